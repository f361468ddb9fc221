from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from typing import Any

import pytest

from reward_loop import RewardSample
from reward_loop.client import chat_complete
from reward_loop.client.http import post, shared_session, url_of
from reward_loop.errors import ConfigError, RequestError
from reward_loop.records import ActiveSample, active_samples
from reward_loop.testing import BadJson, Drop, FakeJudge, Stall, Status
from tests.gsm8k import ROOT
from tests.servers import refusing, until


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1/chat/completions"),
        ("[::1]:8000", "http://[::1]:8000/v1/chat/completions"),
        ("http://judge:8000/", "http://judge:8000/v1/chat/completions"),
        ("https://api.openai.com/v1", "https://api.openai.com/v1/chat/completions"),
        ("https://host/openai/v2/", "https://host/openai/v2/chat/completions"),
    ],
)
def test_addresses(address: str, url: str) -> None:
    assert url_of(address, "/v1/chat/completions") == url


@pytest.mark.parametrize("address", [None, ""])
def test_a_missing_address_is_an_error_that_names_the_option(address: str | None) -> None:
    with pytest.raises(ConfigError, match="reward_router_address"):
        url_of(address, "/classify")


@pytest.mark.parametrize(
    "address", ["http://", "ftp://127.0.0.1:1", "127.0.0.1:x", "http://127.0.0.1:99999", "http://[::1", "[::1"]
)
async def test_a_malformed_address_is_a_configuration_error(address: str) -> None:
    with pytest.raises(ConfigError, match="not a valid address"):
        await post(address, "/classify", {})


@pytest.mark.parametrize(
    ("retry_after", "transient", "status"),
    [(1.5, True, 429), (None, True, 503), (None, False, 400), (None, False, 401)],
)
async def test_an_error_has_status_retry_after_and_what_the_server_said(
    retry_after: float | None, transient: bool, status: int
) -> None:
    async with FakeJudge() as judge:
        judge.script(Status(status, retry_after=retry_after, message="not now " * 200))
        with pytest.raises(RequestError) as raised:
            await chat_complete(judge.address, "?", model="judge-7b")
    error = raised.value
    assert (error.status, error.retry_after, error.transient) == (status, retry_after, transient)
    assert f"POST http://{judge.address}/v1/chat/completions (model judge-7b)" in str(error)
    assert "not now" in str(error)
    assert len(str(error)) < 700


async def test_a_broken_answer_is_transient() -> None:
    async with FakeJudge() as judge:
        judge.script(BadJson())
        with pytest.raises(RequestError) as raised:
            await chat_complete(judge.address, "?")
    assert raised.value.status == 200
    assert raised.value.transient
    assert len(judge.requests) == 1


async def test_a_request_whose_connection_is_lost_is_sent_again() -> None:
    async with FakeJudge("8") as judge:
        judge.script(Drop(), Drop(), Drop())
        assert (await chat_complete(judge.address, "?")).text == "8"
    assert len(judge.requests) == 4


@pytest.mark.parametrize(("base", "sent"), [("", 4), ("http://", 1)])
async def test_a_connection_that_is_lost_again_and_again_is_a_transient_error(base: str, sent: int) -> None:
    async with FakeJudge() as judge:
        judge.script(*[Drop()] * 5)
        with pytest.raises(RequestError) as raised:
            await chat_complete(base + judge.address, "?")
    assert raised.value.status is None
    assert raised.value.transient
    assert len(judge.requests) == sent  # a service with a base URL might charge for each


@pytest.mark.integration
async def test_the_deadline_covers_a_request_that_is_sent_again() -> None:
    async with FakeJudge() as judge:
        judge.script(Drop(), Stall())
        with pytest.raises(RequestError, match=r"no answer within 5 s"):
            await chat_complete(judge.address, "?", timeout=5)
    assert len(judge.requests) == 2


async def test_a_refused_connection_is_transient() -> None:
    address = refusing().removeprefix("http://")
    with pytest.raises(RequestError, match=address) as raised:
        await chat_complete(address, "?")
    assert raised.value.transient


@pytest.mark.integration
async def test_the_deadline_closes_the_connection() -> None:
    async with FakeJudge() as judge:
        judge.script(Stall())
        for seconds in (1, 5, 30, 120):
            with pytest.raises(RequestError, match=rf"no answer within {seconds} s"):
                await chat_complete(judge.address, "?", timeout=seconds)
            if judge.requests:  # else a busy machine did not deliver the request in time
                break
        assert await asyncio.to_thread(judge.requests[0].ended.wait, 30)
        assert judge.requests[0].abandoned


async def test_cancellation_reaches_the_server() -> None:
    async with FakeJudge() as judge:
        judge.script(Stall())
        task = asyncio.create_task(chat_complete(judge.address, "?", timeout=None))
        await until(lambda: judge.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(judge.requests[0].ended.wait, 30)
        assert judge.requests[0].abandoned


async def test_a_sample_lists_its_requests_in_flight() -> None:
    async with FakeJudge() as judge:
        judge.script(Stall())
        with ActiveSample(RewardSample("x", uid="q1"), "compute_score (judge.py)") as call:
            task = asyncio.create_task(chat_complete(judge.address, "?", model="m"))
            await until(lambda: judge.requests)
            assert call in active_samples()
            assert call.describe()["asking"] == [f"POST http://{judge.address}/v1/chat/completions (model m)"]
            task.cancel()
            await asyncio.wait([task])
            assert call.asking == []
    assert call not in active_samples()


async def test_the_key_comes_from_the_environment_and_is_not_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    async with FakeJudge() as judge:
        judge.script("fine", Status(401))
        await chat_complete(judge.base_url, "?", api_key_env="JUDGE_KEY")
        assert judge.requests[0].headers["authorization"] == "Bearer s3cret"
        with pytest.raises(RequestError) as raised:
            await chat_complete(judge.base_url, "?", api_key_env="JUDGE_KEY")
        assert "s3cret" not in str(raised.value)
        with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
            await chat_complete(judge.base_url, "?", api_key_env="NO_SUCH_KEY")
        assert len(judge.requests) == 2


def set_proxies(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("http://judge.example/v1/chat/completions", "http://proxy:3128"),
        ("http://10.0.0.1:8000/classify", "http://proxy:3128"),
        ("https://api.openai.com/v1/chat/completions", "http://secure:3129"),
        ("http://localhost:8000/classify", None),
        ("http://127.0.0.2:8000/classify", None),
        ("http://[::1]:8000/classify", None),
        ("https://internal.example/v1/chat/completions", None),
        ("http://gpu.internal.example:8000/classify", None),
        ("http://other.example:8000/classify", None),
        ("http://other.example:8001/classify", "http://proxy:3128"),
    ],
)
def test_the_proxy_of_an_address(monkeypatch: pytest.MonkeyPatch, url: str, proxy: str | None) -> None:
    from reward_loop.client.http import _proxy

    set_proxies(
        monkeypatch,
        HTTP_PROXY="proxy:3128",
        https_proxy="http://secure:3129",
        NO_PROXY="internal.example,other.example:8000",
    )
    assert _proxy(url) == proxy


async def test_http_requests_go_through_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeJudge() as proxy:
        set_proxies(monkeypatch, http_proxy=f"http://{proxy.address}")
        await post("http://judge.invalid:8000", "/v1/chat/completions", {"messages": []})
        assert len(proxy.requests) == 1
        # A router address has no proxy: it is in the cluster.
        with pytest.raises(RequestError):
            await post("judge.invalid:8000", "/v1/chat/completions", {"messages": []})
        assert len(proxy.requests) == 1


async def test_lone_surrogates_can_be_sent() -> None:
    async with FakeJudge() as judge:
        await chat_complete(judge.address, "a \ud800 b")
        assert judge.requests[0].body["messages"][0]["content"] == "a \ud800 b"


def sessions_of_two_loops() -> None:
    async def ask(address: str) -> Any:
        await asyncio.gather(*(chat_complete(address, "?") for _ in range(8)))
        session = await shared_session()
        assert await shared_session() is session
        return session

    with FakeJudge() as judge:
        first = asyncio.run(ask(judge.address))
        second = asyncio.run(ask(judge.address))
        assert first is not second
        assert first.closed
        assert second.closed
        del first, second
        gc.collect()


def test_each_loop_has_one_session_which_is_closed_with_it() -> None:
    # In a process of its own: the garbage of other tests is not meant.
    program = f"from {__name__} import sessions_of_two_loops; sessions_of_two_loops()"
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "nclosed" not in done.stderr
