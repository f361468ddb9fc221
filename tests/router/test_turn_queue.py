"""Models that take turns, behind a router: who owns the servers wakes them up as the router says."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

import reward_loop
from reward_loop import RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop._util.transient import RouterCode
from reward_loop.client import Judge, Number, chat_complete, http
from reward_loop.errors import LimitError, RequestError
from reward_loop.limits import REWARD_MODEL
from reward_loop.router import control, model_turns
from reward_loop.router import pool as pool_module
from reward_loop.router.error_answers import Refusal
from reward_loop.router.model_turns import TurnQueue
from tests.clock import until
from tests.servers import CHAT, model_server, routed, serving

HEADERS = {"x-reward-loop-takes-turns": "1"}


async def test_a_request_waits_until_its_model_is_awake_and_the_owner_is_called() -> None:
    queue = TurnQueue(["a", "b"], 60)

    async def ask(model: str) -> str:
        async with queue.turn(model, wait=True):
            return model

    asking = [asyncio.create_task(ask(model)) for model in "aba"]
    assert await queue.next_model(None) == "a"
    assert not any(request.done() for request in asking)
    assert await queue.next_model("a") == "b"
    assert [request.done() for request in asking] == [True, False, True]
    owner = asyncio.create_task(queue.next_model("b"))
    assert await asyncio.gather(*asking) == list("aba")
    owner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await owner
    with pytest.raises(Refusal, match="'b' sleeps; no other is awake"):
        async with queue.turn("b", wait=False):
            pass


async def test_a_wait_has_a_bound_and_a_cancelled_one_wakes_nothing_up() -> None:
    queue = TurnQueue(["a", "b"], 0.01)
    with pytest.raises(Refusal, match=r"'a' did not wake up within 0\.01 s"):
        async with queue.turn("a", wait=True):
            pass
    with pytest.raises(Refusal, match=r"'b' did not wake up within 0\.01 s"):
        await queue.until_awake("b")
    with pytest.raises(Refusal, match="no model 'c' takes turns, only a, b"):
        await queue.until_awake("c")
    with pytest.raises(Refusal, match=r"'b' did not wake up within 60 s"):
        await TurnQueue(["a", "b"], 60).until_awake("b", waited_s=60)
    waiting = asyncio.create_task(TurnQueue(["a"], 60).until_awake("a"))
    await asyncio.sleep(0)
    waiting.cancel()
    owner = asyncio.create_task(queue.next_model("a"))
    await asyncio.sleep(0)
    assert not owner.done()
    owner.cancel()


def reply(text: str) -> str:
    return json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})


class Owner:
    """Owns the servers of the models ``a`` and ``b``: adds them to a router when they wake up."""

    def __init__(self, session: aiohttp.ClientSession, urls: dict[str, str]) -> None:
        self.session, self.urls, self.wakes = session, urls, list[str]()
        self.before: dict[str, Callable[[], Awaitable[Any]]] = {}
        """Model -> what is awaited before it wakes up."""

    async def run(self) -> None:
        awake: str | None = None
        while True:
            options = {} if awake is None else {"awake": awake}
            async with self.session.post("/turns", params=options) as response:
                name = await response.json()
            if awake is not None:
                await self.session.delete("/workers", params={"url": self.urls[awake]})
            if name in self.before:
                await self.before[name]()
            await self.session.post("/workers", json={"url": self.urls[name], "models": [name]})
            awake = name
            self.wakes.append(name)


@asynccontextmanager
async def two_models(**options: Any) -> AsyncIterator[tuple[str, Owner]]:
    replies = {
        name: json.dumps({"choices": [{"message": {"content": name}, "finish_reason": "stop"}]}) for name in "ab"
    }
    async with (
        serving(model_server(replies["a"])) as a,
        serving(model_server(replies["b"])) as b,
        routed(turns=("a", "b"), **options) as (url, _, session),
        asyncio.timeout(60),
    ):
        owner = Owner(session, {"a": a, "b": b})
        running = asyncio.create_task(owner.run())
        try:
            yield url.removeprefix("http://"), owner
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_functions_that_ask_one_model_and_then_the_other_wake_each_once() -> None:
    async with two_models() as (address, owner):

        async def judge(number: int) -> list[str]:
            # The second request does not come from this library, so it waits in the router.
            first = await chat_complete(address, str(number), model="a")
            async with owner.session.post(CHAT, json={"model": "b", "messages": []}) as response:
                return [first.text, (await response.json(content_type=None))["choices"][0]["message"]["content"]]

        assert await asyncio.gather(*map(judge, range(20))) == [["a", "b"]] * 20
        assert owner.wakes == ["a", "b"]


async def test_errors_say_which_models_there_are() -> None:
    async with two_models() as (address, owner):
        await chat_complete(address, "awake", model="a")
        for body, status, message in (
            ({"messages": []}, 400, "the field 'model' is missing; available models: a, b"),
            ({"model": "c"}, 404, "the model 'c' does not exist; available models: a, b"),
        ):
            async with owner.session.post(CHAT, json=body) as response:
                assert (response.status, (await response.json())["error"]["message"]) == (status, message)
        async with owner.session.get("/v1/models") as response:
            assert {card["id"] for card in (await response.json())["data"]} == {"a", "b"}
        async with owner.session.post("/turns/wait", params={"model": "c"}) as response:
            assert response.status == 404


async def test_a_client_that_waits_itself_is_refused_with_a_code() -> None:
    async with (
        routed(turns=("a", "b")) as (_, _, session),
        session.post(CHAT, json={"model": "b"}, headers=HEADERS) as response,
    ):
        assert (response.status, (await response.json())["error"]["code"]) == (503, RouterCode.MODEL_ASLEEP)
    async with routed() as (_, _, session), session.post("/turns/wait", params={"model": "b"}) as response:
        assert response.status == 404


async def test_a_model_that_does_not_wake_up_fails_the_call_that_asks_for_it() -> None:
    async with routed(turns=("a", "b"), turn_timeout_s=0.05) as (url, _, _):
        with pytest.raises(RequestError, match=r"did not wake up within 0\.05 s") as caught:
            await chat_complete(url.removeprefix("http://"), "?", model="b")
        assert caught.value.final


async def test_while_a_wait_lasts_the_router_shows_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert http.SILENT_S == model_turns.SILENT_S > 2 * model_turns.ALIVE_S
    monkeypatch.setattr(control, "ALIVE_S", 0.01)
    async with routed(turns=("a", "b")) as (url, _, session):
        async with session.post("/turns") as owner:
            assert await owner.content.readexactly(3) == b"   "
            async with session.post("/turns/wait", params={"model": "b"}) as wait:
                assert await wait.content.readexactly(3) == b"   "
                assert await owner.json() == "b"
        async with session.post("/turns/wait", params={"model": "b", "waited": "nan"}) as answer:
            assert answer.status == 422
    # An error that comes later is in the body alone.
    async with routed(turns=("a", "b"), turn_timeout_s=0.2) as (url, _, _):
        with pytest.raises(RequestError, match=r"did not wake up within 0\.2 s"):
            await chat_complete(url.removeprefix("http://"), "?", model="b")


async def test_a_wait_that_a_router_did_not_answer_goes_on_and_one_that_it_answered_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        seen.append(scope["path"] + scope["query_string"].decode())
        body, status = SLEEPS, 503
        if scope["path"] == "/turns/wait":
            now[0] += 100
            body, status = b"null", 200
        elif now[0] > 400:
            body, status = reply("b").encode(), 200
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(body))]}
        )
        if scope["path"] != "/turns/wait" or now[0] > 200:  # else the connection ends before the answer
            await send({"type": "http.response.body", "body": body})

    now = [0.0]
    monkeypatch.setattr(http, "time", SimpleNamespace(**vars(time) | {"monotonic": lambda: now[0]}))
    async with serving(app) as url:
        assert (await chat_complete(url.removeprefix("http://"), "?", model="b")).text == "b"
    # The third wait ended with a turn, for which the request came too late.
    waits = ("0.0", "100.0", "200.0", "0.0", "0.0")
    assert seen[1::2] == [f"/turns/waitmodel=b&waited={waited}" for waited in waits]


async def test_a_request_whose_limit_refuses_it_after_the_wait_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record shows what never ended, so an error outside of the request itself must end it, too."""
    permits = itertools.count()
    sent: list[dict[str, Any]] = []

    @asynccontextmanager
    async def limit(name: str) -> AsyncIterator[None]:
        if next(permits):
            raise LimitError(f"no permit of {name!r} within 1 s")
        yield

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        is_wait = scope["path"] == "/turns/wait"
        await send({"type": "http.response.start", "status": 200 if is_wait else 503, "headers": []})
        await send({"type": "http.response.body", "body": b"null" if is_wait else SLEEPS})

    monkeypatch.setattr(http, "limited", limit)
    monkeypatch.setattr(http, "_destination", lambda: sent.append)
    judge = Judge("{{answer}}", Number(1, 10), model="b", limit="x")
    async with serving(app) as url:
        with pytest.raises(LimitError, match="no permit"):
            await judge(url.removeprefix("http://"), answer="?")
    assert "no permit of 'x' within 1 s" in sent[-1]["error"]
    assert sent[-1]["seconds"] >= 0


async def test_a_router_that_is_silent_while_a_model_sleeps_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first answer is that the model sleeps; then it accepts connections, and sends nothing."""
    monkeypatch.setattr(http, "SILENT_S", 0.05)
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        head = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
        if asked == 1:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head % (len(SLEEPS), SLEEPS))
        else:
            await reader.read()  # until the client gives up
        writer.close()

    async with asyncio.timeout(60), await asyncio.start_server(serve, "127.0.0.1") as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(RequestError, match=r"no answer within 0\.05 s"):
            await chat_complete(f"{host}:{port}", "?", model="b", timeout=0.05)
    assert asked == 3  # the request, the wait, and the request


SLEEPS = json.dumps({"error": {"message": "b sleeps", "code": RouterCode.MODEL_ASLEEP}}).encode()


async def test_a_model_whose_servers_do_not_come_up_has_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_START_CHECK_S", 0.05)
    async with routed(turns=("a", "b")) as (_, _, session):
        await session.post("/workers", json={"url": "http://127.0.0.1:9", "models": ["a"]})
        async with session.post("/turns", params={"awake": "a"}) as response:
            assert response.status == 503
            assert "no server of 'a' is up: http://127.0.0.1:9 is down" in (await response.json())["error"]["message"]


async def test_after_a_server_that_dies_in_its_turn_the_next_model_has_its_own() -> None:
    async def asks(solution_str: str, reward_router_address: str) -> float:
        return float((await chat_complete(reward_router_address, "?", model=solution_str)).text == solution_str)

    function = ScoringFunction(asks, options=RewardLoopConfig(outage_timeout_s=0.5, retry={"max_attempts": 1}))
    async with AsyncExitStack() as dies, serving(model_server(reply("b"))) as b, asyncio.timeout(60):
        a = await dies.enter_async_context(serving(model_server(reply("a"))))
        async with routed(turns=("a", "b"), health_interval_s=0.1) as (url, _, session):
            address = url.removeprefix("http://")
            running = asyncio.create_task(Owner(session, {"a": a, "b": b}).run())
            assert (await function(RewardSample("a"), reward_router_address=address)).score == 1.0
            await dies.aclose()
            late, other = (
                asyncio.create_task(function(RewardSample(model), reward_router_address=address)) for model in "ab"
            )
            assert (await other).score == 1.0
            for task in (late, running):  # in a run, its owner ends judging when the model should wake up again
                task.cancel()
            await asyncio.gather(late, running, return_exceptions=True)


@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=pytest.mark.integration)])
async def test_calls_wait_outside_their_deadlines_and_without_a_place_at_the_reward_model(isolated: bool) -> None:
    async with two_models() as (address, owner):
        late = asyncio.Event()
        owner.before = {"b": late.wait}
        options = RewardLoopConfig(
            timeout=DEADLINE_S,
            limits={REWARD_MODEL: {"max_concurrent": 1, "max_wait": None}},
            retry={"max_attempts": 1},
            isolation="process" if isolated else "thread",
        )
        function = ScoringFunction(asks_both_in_a_process if isolated else asks_both, options=options)
        calls = [
            asyncio.create_task(function(RewardSample(str(number)), reward_router_address=address))
            for number in range(1 if isolated else 5)
        ]
        await until(lambda: owner.wakes == ["a"])
        await asyncio.sleep(2 * DEADLINE_S)  # the deadline of each, before the model wakes up
        late.set()
        results = await asyncio.gather(*calls)
        await asyncio.to_thread(function.close)
        assert [result.outcome for result in results] == ["scored"] * len(calls)
        assert max(result.wait_s for result in results) > DEADLINE_S
        # With one place, they would else alternate between the models.
        assert owner.wakes == ["a", "b"]


DEADLINE_S = 3.0


async def test_calls_that_hold_a_limit_of_their_own_while_a_model_sleeps_do_not_wait_for_each_other() -> None:
    async with two_models() as (address, _):

        async def judge(solution_str: str, reward_router_address: str) -> float:
            async with reward_loop.limit("mine"):
                reply = await chat_complete(reward_router_address, solution_str, model="b")
            return float(reply.text == "b")

        limits = {REWARD_MODEL: {"max_concurrent": 1, "max_wait": None}, "mine": {"max_concurrent": 1}}
        function = ScoringFunction(judge, options=RewardLoopConfig(limits=limits))
        results = await asyncio.gather(
            *(function(RewardSample(str(number)), reward_router_address=address) for number in range(4))
        )
        assert [result.score for result in results] == [1.0] * 4


async def asks_both(solution_str: str, reward_router_address: str) -> float:
    replies = [await chat_complete(reward_router_address, solution_str, model=model) for model in "ab"]
    return float([reply.text for reply in replies] == ["a", "b"])


def asks_both_in_a_process(solution_str: str, reward_router_address: str) -> float:
    return asyncio.run(asks_both(solution_str, reward_router_address))
