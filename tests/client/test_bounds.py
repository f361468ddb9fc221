from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import os
import resource
import subprocess
import sys
import threading
from typing import Any

import pytest

from reward_loop.client import Judge, Number, bounds, chat_complete, classify
from reward_loop.client.bounds import max_connections
from reward_loop.client.http import post, shared_session
from reward_loop.errors import RequestError
from reward_loop.testing import Body, FakeJudge
from tests.gsm8k import ROOT
from tests.servers import serving


def scenario(name: str, *arguments: object) -> None:
    """Runs a function of this module in a process that may open 64 descriptors."""
    call = f"from {__name__} import {name}; {name}({', '.join(map(repr, arguments))})"
    program = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); {call}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


async def many(address: str, calls: int = 200) -> None:
    replies = await asyncio.gather(*(chat_complete(address, "?", timeout=120) for _ in range(calls)))
    assert {reply.text for reply in replies} == {"Score: 1"}


def many_calls(address: str) -> None:
    asyncio.run(many(address))


def many_calls_of_three_loops(address: str) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(many(address))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def a_call_without_a_free_descriptor(address: str) -> None:
    async def main() -> None:
        held: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        task = asyncio.create_task(chat_complete(address, "?", timeout=120))
        await asyncio.wait([task], timeout=1)
        assert not task.done(), task.exception()
        for file in held:
            os.close(file)
        assert (await task).text == "Score: 1"

    asyncio.run(main())


@pytest.mark.integration
@pytest.mark.parametrize("name", ["many_calls", "many_calls_of_three_loops", "a_call_without_a_free_descriptor"])
def test_calls_wait_for_a_connection_where_few_files_may_be_open(name: str) -> None:
    with FakeJudge(latency=0.01) as judge:
        scenario(name, judge.address)


async def test_a_request_is_sent_again_until_a_descriptor_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_RETRY_S", 0.0)
    outcomes: list[Any] = [OSError(errno.EMFILE, "x"), OSError(errno.ENFILE, "x"), "the response"]

    async def send() -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    assert await bounds.with_descriptor(send) == "the response"
    outcomes.append(OSError(errno.ECONNREFUSED, "refused"))
    with pytest.raises(OSError, match="refused"):
        await bounds.with_descriptor(send)


def test_the_pool_has_half_of_the_descriptors_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    limit: tuple[int, int] = (1024, 4096)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limit)
    assert 1 <= max_connections() < 512
    limit = (1, 1)
    assert max_connections() == 1
    limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert max_connections() == 0


async def test_the_pool_of_an_event_loop_has_this_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_loop.client.http.max_connections", lambda: 7)
    connector = (await shared_session()).connector
    assert connector is not None
    assert connector.limit == 7


def sender(body: bytes, *headers: tuple[bytes, bytes], status: int = 200) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
        await send({"type": "http.response.body", "body": body})

    return app


BOMB = gzip.compress(b" " * 20_000_000)


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize(
    ("body", "headers"), [(BOMB, [(b"content-encoding", b"gzip")]), (b" " * 2_000_000, [])], ids=["gzip", "plain"]
)
async def test_a_reply_that_is_too_long_is_an_error_that_names_address_and_option(
    body: bytes, headers: Any, status: int
) -> None:
    async with serving(sender(body, *headers, status=status)) as url:
        with pytest.raises(RequestError, match="more than 1000000 bytes after decompression") as raised:
            await post(url, "/classify", {}, max_reply_bytes=1_000_000)
    assert url in str(raised.value)
    assert "max_reply_bytes" in str(raised.value)
    assert raised.value.status == status


async def test_every_client_function_has_the_bound() -> None:
    judge_of = Judge("{{answer}}", Number(0, 1), max_reply_bytes=10)
    async with FakeJudge() as judge:
        for call in (
            chat_complete(judge.address, "?", max_reply_bytes=10),
            classify(judge.address, "?", max_reply_bytes=10),
            judge_of(judge.address, answer="x"),
        ):
            with pytest.raises(RequestError, match="more than 10 bytes"):
                await call
        assert all("max_reply_bytes" not in request.body for request in judge.requests)


@pytest.mark.parametrize("target", [b"http://", b"http://[::1", b"ftp://127.0.0.1/", b"http://a:b:c/"])
async def test_a_redirect_to_an_invalid_url_is_a_request_error(target: bytes) -> None:
    async with serving(sender(b"", (b"location", target), status=307)) as url:
        with pytest.raises(RequestError, match="redirected") as raised:
            await post(url, "/classify", {})
    assert url in str(raised.value)


def chat(message: Any, **fields: Any) -> Body:
    return Body({"choices": [{"message": message, "finish_reason": "stop"} | fields], "model": "m"})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (chat({"content": ["a", "b"]}), "content"),
        (chat({"content": 7}), "content"),
        (chat({"content": {"text": "a"}}), "content"),
        (chat({"content": False}), "content"),
        (chat({"content": "a", "reasoning_content": ["b"]}), "reasoning_content"),
        (chat({"content": "a"}, finish_reason={"x": 1}), "finish_reason"),
    ],
)
async def test_a_reply_that_is_not_text_is_an_error_that_names_the_field(body: Body, field: str) -> None:
    async with FakeJudge() as judge:
        judge.script(body)
        with pytest.raises(RequestError, match=f"'{field}' is not text") as raised:
            await chat_complete(judge.address, "?")
        assert judge.address in str(raised.value)


async def test_a_reply_without_content_is_empty_text() -> None:
    async with FakeJudge() as judge:
        judge.script(chat({"content": None}), chat({}))
        assert [(await chat_complete(judge.address, "?")).text for _ in range(2)] == ["", ""]


async def test_a_classification_without_logits_is_an_error() -> None:
    async with FakeJudge() as judge:
        judge.script(Body({"data": [{"probs": []}]}))
        with pytest.raises(RequestError, match="without logits"):
            await classify(judge.address, "?")
