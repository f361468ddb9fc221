"""What an exception is after its way from a worker process to the process that called the function."""

from __future__ import annotations

import asyncio
import pickle

import httpx
import pytest

from reward_loop._util.transient import is_refusal, is_transient, out_of_credit, retry_after, status_of
from reward_loop.processes.outcome import RemoteError, cause_of, describe_exception
from tests.processes.misbehaving import StatusError


def received(error: BaseException) -> RemoteError:
    remote: RemoteError = pickle.loads(pickle.dumps(RemoteError.of(error)))
    return remote


@pytest.mark.parametrize(
    ("status", "transient", "refusal"), [(503, True, False), (429, True, True), (529, True, True), (404, False, False)]
)
def test_whether_a_retry_may_succeed_is_the_same_after_pickling(status: int, transient: bool, refusal: bool) -> None:
    error = StatusError("the service says no", status_code=status, retry_after=7.0)
    with pytest.raises(TypeError):  # as errors of openai and httpx, which have keyword-only arguments
        pickle.loads(pickle.dumps(error))
    remote = received(error)
    assert (is_transient(remote), is_refusal(remote), retry_after(remote)) == (transient, refusal, 7.0)
    assert (is_transient(error), is_refusal(error), retry_after(error)) == (transient, refusal, 7.0)
    assert refusal or status_of(remote) == status
    assert describe_exception(remote) == "StatusError: the service says no"
    raised_from_it = ConnectionError("the judge failed")
    raised_from_it.__cause__ = error
    assert is_transient(received(raised_from_it)) == transient


def test_whether_a_service_has_no_credit_is_read_from_its_answer_and_not_from_lines_of_code() -> None:
    def refuses(body: str) -> httpx.HTTPStatusError:
        answer = httpx.Response(429, text=body, request=httpx.Request("POST", "http://judge"))
        with pytest.raises(httpx.HTTPStatusError) as raised:
            answer.raise_for_status() and "insufficient_quota"
        return raised.value

    for body, expected in (('{"error": {"code": "insufficient_quota"}}', True), ("slow down", False)):
        error = refuses(body)
        remote = received(error)
        assert (out_of_credit(error), out_of_credit(remote)) == (expected, expected)
        assert "insufficient_quota" in describe_exception(remote)


def test_a_group_of_exceptions_is_described_by_its_first_error() -> None:
    async def judge() -> None:
        raise ConnectionError("the judge is down")

    async def panel() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(judge())

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(panel())
    described = describe_exception(raised.value)
    first = (
        "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception); the first: ConnectionError: the judge is"
    )
    assert described.startswith(first)
    assert "in judge" in described
    assert cause_of(raised.value).startswith(f"ConnectionError in judge ({__file__}:")
