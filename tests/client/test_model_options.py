"""Limit and deadline of the requests to a named model, which are options, and what a function gives instead."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from reward_loop import ConfigError, RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop.client import Choice, Judge, chat_complete, classify, score
from reward_loop.config import RewardModelConfig, parse
from reward_loop.errors import RequestError
from reward_loop.limits import LocalLimits
from reward_loop.testing import FakeJudge, Stall
from tests.support.clock import until
from tests.support.servers import serving

JUDGE = ("{{answer}}", Choice({"yes": 1.0, "no": 0.0}, after=None))
MODELS = {"strong": {"max_concurrent": 2, "timeout": 0.05}}


@contextlib.asynccontextmanager
async def at(gate: Gate) -> AsyncIterator[str]:
    """Serve the requests; yields the URL. Those that are left are answered at the end."""
    async with serving(gate) as url, asyncio.timeout(60):
        try:
            yield url
        finally:
            gate.open.set()


class Gate:
    """A server of the models ``strong`` and ``weak`` that answers when its gate is open; it counts requests."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.open = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        body: Any = {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}], "data": [{"probs": [1]}]}
        if scope["path"] == "/v1/models":
            body = {"object": "list", "data": [{"id": name, "object": "model"} for name in ("strong", "weak")]}
        elif scope["method"] == "POST":
            self.now += 1
            self.most = max(self.most, self.now)
            waits = [asyncio.create_task(self.open.wait()), asyncio.create_task(receive())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)  # the latter is the end of the connection
            self.now -= 1
            for wait in waits:
                wait.cancel()
            if not self.open.is_set():
                return
        data = json.dumps(body).encode()
        head = [(b"content-length", b"%d" % len(data)), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": data})


async def asks_strong(solution_str: str, reward_router_address: str) -> float:
    return float((await chat_complete(reward_router_address, "?", model="strong", timeout=60)).text == "yes")


async def scored(
    function: Callable[..., Any], gate: Gate, at_first: int, workers: int = 1, **options: Any
) -> list[float | None]:
    """Score 12 samples by some workers; the gate opens when as many requests as may be are at the server."""
    limits = LocalLimits(given := RewardLoopConfig(models=MODELS, **options))
    functions = [ScoringFunction(function, options=given, limits=limits) for _ in range(workers)]
    async with at(gate) as url:
        address = url.removeprefix("http://")
        calls = [
            asyncio.create_task(one(RewardSample(str(number)), reward_router_address=address))
            for one in functions
            for number in range(12 // workers)
        ]
        await until(lambda: gate.now == at_first)
        gate.open.set()
        results = await asyncio.gather(*calls)
    for one in functions:
        await asyncio.to_thread(one.close)
    return [result.score for result in results]


@pytest.mark.parametrize("workers", [1, 3])
async def test_the_requests_of_all_workers_to_a_model_have_its_limit(workers: int) -> None:
    assert await scored(asks_strong, gate := Gate(), 2, workers) == [1.0] * 12
    assert gate.most == 2


async def test_requests_with_another_limit_or_to_another_model_do_not_count() -> None:
    other = Judge(*JUDGE, model="strong", limit="other", timeout=60)

    async def asks(solution_str: str, reward_router_address: str) -> float | None:
        if int(solution_str) < 3:
            return (await other(reward_router_address, answer="?")).score
        return float((await chat_complete(reward_router_address, "?", model="weak")).text == "yes")

    assert await scored(asks, gate := Gate(), 12, limits={"other": {"max_concurrent": 3}}) == [1.0] * 12
    assert gate.most == 12


async def test_a_request_waits_for_the_limit_outside_the_deadlines() -> None:
    gate = Gate()
    options = RewardLoopConfig(models={"strong": {"max_concurrent": 1}}, timeout=0.2, retry={"max_attempts": 1})
    function = ScoringFunction(asks_strong, options=options)
    async with at(gate) as url:
        one, two = (
            asyncio.create_task(function(RewardSample(str(number)), reward_router_address=url.removeprefix("http://")))
            for number in range(2)
        )
        late = await one  # the gate is closed, so it passes the deadline; the second one waited meanwhile
        gate.open.set()
        assert (await two).score == 1.0
    assert "ran past its deadline of 0.2 s" in (late.error or "")


async def test_the_deadline_of_a_model_applies_to_each_request_without_its_own() -> None:
    strong = Judge(*JUDGE, model="strong")
    requests: dict[str, tuple[Callable[[str], Any], str]] = {
        "judge": (lambda address: strong(address, answer="?"), "0.05"),
        "chat": (lambda address: chat_complete(address, "?", model="strong"), "0.05"),
        "classify": (lambda address: classify(address, "?", model="strong"), "0.05"),
        "rerank": (lambda address: score(address, "?", ["x"], model="strong"), "0.05"),
        "unnamed": (lambda address: chat_complete(address, "?"), "0.05"),
        "its own": (lambda address: chat_complete(address, "?", model="strong", timeout=0.06), "0.06"),
    }
    seen = {}

    async def asks(solution_str: str, reward_router_address: str) -> float:
        with pytest.raises(RequestError) as caught:
            await requests[solution_str][0](reward_router_address)
        seen[solution_str] = str(caught.value)
        return 1.0

    function = ScoringFunction(asks, options=RewardLoopConfig(models=MODELS, retry={"max_attempts": 1}))
    with FakeJudge(faults={Stall(): 1.0}) as judge:
        for name in requests:
            assert (await function(RewardSample(name), reward_router_address=judge.address)).error is None
    for name, (_, seconds) in requests.items():
        assert f"no answer within {seconds} s" in seen[name]


def test_the_options_of_served_models_are_those_of_their_requests() -> None:
    options = {"model_path": "/m", "timeout": 30, "models": {"strong": {"model_path": "/s", "max_concurrent": 4}}}
    requests = parse(RewardModelConfig, options, "reward_model.server").requests()
    assert requests == {
        "/m": {"max_concurrent": None, "timeout": 30},
        "strong": {"max_concurrent": 4, "timeout": None},
    }
    with pytest.raises(ConfigError, match="set served_model_name"):
        RewardModelConfig(engine="external", urls=("http://h:1",), timeout=30).requests()
    with pytest.raises(ConfigError, match=r"models\.strong\.max_concurent: unknown option; did you mean 'max_concurr"):
        parse(RewardModelConfig, {"models": {"strong": {"max_concurent": 4}}}, "reward_model.server")
