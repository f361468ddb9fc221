from __future__ import annotations

import asyncio
import gc
import gzip
import re
import subprocess
import sys
import traceback
from collections import Counter
from typing import Any

import pytest

from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample
from reward_loop.client import Judge, Number, chat_complete, classify, http
from reward_loop.client.http import GROUP_HEADER, shared_session
from reward_loop.errors import ConfigError, RequestError
from reward_loop.managers import BatchRewardLoopManager
from reward_loop.records import ActiveSample, active_samples
from reward_loop.records.writer import encode_record
from reward_loop.testing import Answer, Body, Drop, FakeJudge, Stall, Status
from tests.support.clock import advance, until
from tests.support.gsm8k import ROOT
from tests.support.servers import serving


@pytest.mark.parametrize(
    ("retry_after", "transient", "status"),
    [(1.5, True, 429), (None, True, 500), (None, False, 400), (None, False, 401)],
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


async def test_a_request_whose_connection_is_lost_is_sent_again() -> None:
    async with FakeJudge("8") as judge:
        judge.script(Drop())
        assert (await chat_complete(judge.address, "?")).text == "8"
    assert len(judge.requests) == 2


async def test_a_connection_that_a_busy_event_loop_sees_late_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    now, connect = loop.time, loop.sock_connect

    async def late(*args: Any) -> None:
        await connect(*args)
        monkeypatch.setattr(loop, "time", lambda: now() + 60)
        await asyncio.sleep(0.01)  # the timers that expire run first

    monkeypatch.setattr(loop, "sock_connect", late)
    async with FakeJudge("8") as judge:
        assert (await chat_complete(judge.address, "?")).text == "8"


@pytest.mark.parametrize(("base", "sent"), [("", 2), ("http://", 1)])
async def test_a_connection_that_is_lost_again_and_again_is_a_transient_error(base: str, sent: int) -> None:
    async with FakeJudge() as judge:
        judge.script(*[Drop()] * 5)
        with pytest.raises(RequestError) as raised:
            await chat_complete(base + judge.address, "?")
    assert raised.value.status is None
    assert raised.value.transient
    assert len(judge.requests) == sent  # a service with a base URL might charge for each


async def test_the_deadline_covers_a_request_that_is_sent_again() -> None:
    async with FakeJudge() as judge:
        judge.script(Drop(), Stall())
        asking = asyncio.create_task(chat_complete(judge.address, "?", timeout=60))
        await until(lambda: len(judge.requests) == 2)
        await advance(60)
        with pytest.raises(RequestError, match=r"no answer within 60 s"):
            await asking


async def rated(solution_str: str, reward_router_address: str) -> float:
    return float((await chat_complete(reward_router_address, solution_str)).text)


async def all_rated(solution_strs: list[str], reward_router_address: str) -> list[float]:
    return [await rated(text, reward_router_address) for text in solution_strs]


def rated_in_a_thread(solution_str: str, reward_router_address: str) -> float:
    return asyncio.run(rated(solution_str, reward_router_address))


async def groups_sent(judge: FakeJudge, manager: Any, *groups: str | None) -> list[str | None]:
    """Score a sample of each group, and return the headers with the groups, in the order of the requests."""
    await asyncio.gather(*(manager.run_single(RewardSample("?", group=group)) for group in groups))
    await asyncio.to_thread(manager.close)
    assert len(judge.requests) == len(groups)
    return [request.headers.get(GROUP_HEADER) for request in judge.requests]


@pytest.mark.parametrize("function", [rated, rated_in_a_thread])
async def test_the_router_receives_the_group_of_a_sample_as_a_hash(function: Any) -> None:
    async with FakeJudge("8") as judge:
        manager = NaiveRewardLoopManager(compute_score=function, reward_router_address=judge.address)
        sent = Counter(await groups_sent(judge, manager, "one", "one", "other", None))
    assert sent.pop(None) == 1
    assert sorted(sent.values()) == [1, 2]
    assert all(re.fullmatch("[0-9a-f]{16}", group or "") for group in sent)


@pytest.mark.parametrize(("groups", "sends"), [("aa", True), ("ab", False)])
async def test_a_function_of_lists_sends_the_group_that_all_its_samples_share(groups: str, sends: bool) -> None:
    async with FakeJudge("8") as judge:
        manager = BatchRewardLoopManager(
            {"batch": {"max_batch_size": 2, "max_wait_ms": 60_000}},
            compute_score=all_rated,
            reward_router_address=judge.address,
        )
        sent = await groups_sent(judge, manager, *groups)
    assert [group is not None for group in sent] == [sends] * 2


async def test_a_service_does_not_receive_the_group() -> None:
    async with FakeJudge("8") as judge:
        manager = NaiveRewardLoopManager(compute_score=rated, reward_router_address=judge.base_url)
        assert await groups_sent(judge, manager, "one") == [None]


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
            assert call.waits() == [f"POST http://{judge.address}/v1/chat/completions (model m)"]
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


async def test_http_requests_go_through_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeJudge() as proxy:
        set_proxies(monkeypatch, http_proxy=f"http://{proxy.address}")
        await chat_complete("http://judge.invalid:8000", "?")
        assert len(proxy.requests) == 1
        # A router address has no proxy: it is in the cluster.
        with pytest.raises(RequestError):
            await chat_complete("judge.invalid:8000", "?")
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


@pytest.mark.processes
def test_each_loop_has_one_session_which_is_closed_with_it() -> None:
    # In a process of its own: the garbage of other tests is not meant.
    program = f"from {__name__} import sessions_of_two_loops; sessions_of_two_loops()"
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "nclosed" not in done.stderr


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


@pytest.mark.integration
def test_calls_wait_for_a_connection_where_few_files_may_be_open() -> None:
    with FakeJudge(latency=0.01) as judge:
        scenario("many_calls", judge.address)


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
async def test_a_reply_that_is_too_long_is_an_error_that_names_the_address(
    body: bytes, headers: Any, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_REPLY_BYTES", 1_000_000)
    async with serving(sender(body, *headers, status=status)) as url:
        with pytest.raises(RequestError, match="more than 1000000 bytes after decompression") as raised:
            await classify(url, "?")
    assert url in str(raised.value)
    assert raised.value.status == status


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        (b"http://other/v1?key=s3cr3t", "to, http://other/v1"),
        (b"http://[::1", "to, http://[::1"),
        (b"/v1/", "to, /v1/"),
    ],
)
async def test_a_redirect_is_not_followed_and_its_address_is_named_without_its_query(target: bytes, shown: str) -> None:
    async with serving(sender(b"", (b"location", target), status=307)) as url:
        with pytest.raises(RequestError, match="status 307") as raised:
            await classify(url, "?")
    assert str(raised.value).endswith(shown)
    assert not raised.value.transient


def chat(message: Any, **fields: Any) -> Body:
    return Body({"choices": [{"message": message, "finish_reason": "stop"} | fields], "model": "m"})


THINKING = {"type": "thinking", "thinking": [{"type": "text", "text": "Score: 9"}]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([THINKING, {"type": "text", "text": "Score: 3"}], "Score: 3"),
        ([{"type": "reasoning", "text": "Score: 9"}, {"type": "text", "text": "Score"}, {"text": ": 3"}], "Score: 3"),
        ([{"type": "output_text", "text": "Score: 3"}, THINKING], "Score: 3"),
        ([THINKING], ""),
        *((no_text, None) for no_text in (7, False, ["a"], {"text": "a"}, [{"type": "text"}], [{"text": None}])),
    ],
)
async def test_the_text_parts_of_a_content_are_the_reply(content: Any, text: str | None) -> None:
    async with FakeJudge() as judge:
        judge.script(chat({"content": content}))
        if text is not None:
            assert (await chat_complete(judge.address, "?")).text == text
            return
        with pytest.raises(RequestError, match="without a reply in text"):
            await chat_complete(judge.address, "?")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'\xef\xbb\xbf{"choices": [{"message": {"content": "Score: 7"}}]}', "Score: 7"),
        (rb'{"choices": [{"message": {"content": "\ud83d Score: 7"}}]}', "\ufffd Score: 7"),
        (
            rb'{"choices": [{"message": {"content": "\\ud83d \ud83d\ude00 \uDE00 Score: 7"}}]}',
            "\\ud83d \U0001f600 \ufffd Score: 7",
        ),
    ],
)
async def test_a_byte_order_mark_and_text_that_is_not_unicode_lose_no_reply(body: bytes, text: str) -> None:
    async with serving(sender(body)) as url:
        assert (await chat_complete(url, "?")).text == text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"error": {"code": 429, "message": "slow down"}}, 429),
        ({"error": {"code": "402", "message": "no credit"}}, 402),
        ({"choices": [{"message": {"content": "x"}, "finish_reason": "error", "error": {"code": 502}}]}, 502),
        ({"error": {"status": 503}}, 503),
        ({"error": {"message": "no status"}}, 200),
    ],
)
async def test_a_status_in_the_body_of_an_answer_is_its_status(body: dict[str, Any], status: int) -> None:
    async with FakeJudge() as server:
        server.script(Body(body))
        with pytest.raises(RequestError) as caught:
            await chat_complete(server.address, "x")
    assert (caught.value.status, caught.value.transient) == (status, status != 402)


async def test_an_aborted_request_is_sent_again() -> None:
    async with FakeJudge("Score: 7") as server:
        server.script(Answer("Score", "abort"))
        judge = Judge("{{answer}}", Number(1, 10), attempts=2)
        assert (await judge(server.address, answer="4")).score == 7
        assert len(server.requests) == 2


@pytest.mark.parametrize("fault", ["status", "no reply", "not json", "gone"])
async def test_secrets_of_a_base_url_are_in_no_error_and_no_record(fault: str) -> None:
    secrets = ("topsecret-key", "topsecret-user", "topsecret-pass")
    body: Any = {"choices": [], "key": secrets[0]} if fault == "no reply" else f"bad {secrets}"
    if fault == "status":
        body = {"error": {"code": 400, "message": body}}
    async with FakeJudge() as server:
        server.script(Drop() if fault == "gone" else Body(body))
        with ActiveSample(RewardSample("x"), "f") as call, pytest.raises(RequestError) as caught:
            await chat_complete(f"http://{secrets[1]}:{secrets[2]}@{server.address}/v1?key={secrets[0]}", "x")
    shown = str(caught.value) + encode_record(next(iter(call.exchanges.values()))).decode()
    assert not [one for one in secrets if one in shown]


@pytest.mark.parametrize(
    ("url", "said", "shown"),
    [
        (
            "http://me:pass@HOST/v1",
            "http://me:pass@HOST: bad password pass, not 'pass'.",
            "bad password [API key], not",
        ),
        ("http://me:p%40ss@HOST/v1", "p@ss p%40ss bWU6cEBzcw==", "[API key] [API key] [API key]"),
        ("http://k3y@HOST/v1", "the key k3y (k3y)", "the key [API key] ([API key])"),
        ("http://HOST/v1?key=s3cr3t&api-version=v1", "key=s3cr3t, key: s3cr3t", "key=[API key], key: [API key]"),
        ("http://HOST/v1?key=a%2Fb", "a/b", "[API key]"),
        ("http://HOST/v1?api-version=2024-10-21&code=ab", "ab? On 2024-10-21: ", "[API key]? On 2024-10-21: "),
        ("http://HOST/v1?a=1&key=in", "1 minute in index begins", "1 minute [API key] index begins"),
    ],
)
@pytest.mark.parametrize("status", [200, 400])
async def test_short_secrets_are_hidden_where_they_stand_alone(url: str, said: str, shown: str, status: int) -> None:
    app = sender(said.encode(), status=status)
    async with serving(app) as address:
        with ActiveSample(RewardSample("x"), "f") as call, pytest.raises(RequestError) as caught:
            await chat_complete(url.replace("HOST", address.removeprefix("http://")), "x")
    (exchange,) = call.exchanges.values()
    for text in (str(caught.value), exchange["response"], exchange["error"]):
        assert shown in text


@pytest.mark.parametrize("address", ["http://[x/v1?key=s3cr3t", "http://me:s3cr3t?s3cr3t@[x/v1"])
async def test_an_invalid_address_is_named_without_its_secrets(address: str) -> None:
    with pytest.raises(ConfigError) as refused:
        await chat_complete(address, "x")
    printed = [*traceback.format_exception_only(refused.value), repr(refused.value.__cause__)]
    assert "s3cr3t" not in str(printed)
    assert refused.value.__suppress_context__


@pytest.mark.parametrize(("uid", "sent"), [("a-1", "a-1"), ("\u00e9\n1", "%C3%A9%0A1"), (None, None)])
async def test_a_request_names_its_sample_and_the_attempt(uid: str | None, sent: str | None) -> None:
    async def compute_score(solution_str: str, reward_router_address: str) -> float:
        return len((await chat_complete(reward_router_address, "x")).text)

    async with FakeJudge() as server:
        server.script(Status(429, 0.001), "ok")
        options = RewardLoopConfig(retry={"initial_wait": 0.001})
        manager = NaiveRewardLoopManager(options, compute_score=compute_score, reward_router_address=server.address)
        await manager.score(RewardSample("4", uid=uid))
        headers = [request.headers for request in server.requests]
    assert [one.get("x-sample-uid") for one in headers] == [sent, sent]
    if uid is not None:
        assert [one["x-sample-attempt"] for one in headers] == ["1", "2"]
