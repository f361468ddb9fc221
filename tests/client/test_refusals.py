"""Answers with 429 whose body says how long to wait, or that waiting changes nothing."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import web

from reward_loop import Outcome, RewardLoopConfig, RewardLoopError, RewardResult, RewardSample, ScoringFunction
from reward_loop._util import retry_after
from reward_loop.client import chat_complete
from reward_loop.config import RetryConfig
from tests.support.clock import hastened

ANSWER = {"choices": [{"message": {"content": "1"}, "finish_reason": "stop"}]}


class Service:
    """Refuses its first requests with the body of a refusal."""

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.times: list[float] = []

    async def chat(self, request: web.Request) -> web.Response:
        await request.read()
        self.times.append(time.monotonic())
        if self.refusals:
            return web.Response(text=self.refusals.pop(), status=429, content_type="application/json")
        return web.json_response(ANSWER)


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    for name in ("FIRST_S", "LONGEST_S"):
        monkeypatch.setattr(retry_after, name, 0.001)
    service, app = Service(), web.Application()
    app.router.add_post("/v1/chat/completions", service.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    service.address = f"127.0.0.1:{runner.addresses[0][1]}"  # type: ignore[attr-defined]
    yield service
    await runner.cleanup()


async def by_our_client(solution_str: str, reward_router_address: str) -> float:
    return float((await chat_complete(reward_router_address, solution_str)).text)


async def by_our_client_with_a_base_url(solution_str: str, reward_router_address: str) -> float:
    return float((await chat_complete(f"http://{reward_router_address}/v1", solution_str)).text)


async def by_httpx(solution_str: str, reward_router_address: str) -> float:
    async with httpx.AsyncClient(trust_env=False) as client:
        response = await client.post(f"http://{reward_router_address}/v1/chat/completions", json={})
    return float(response.raise_for_status().json()["choices"][0]["message"]["content"])


clients = pytest.mark.parametrize("client", [by_our_client, by_our_client_with_a_base_url, by_httpx])


def message(text: str) -> str:
    return json.dumps({"error": {"message": text, "code": "rate_limit_exceeded"}})


async def scored(client: Any, service: Any) -> RewardResult:
    options = RewardLoopConfig(retry=RetryConfig(initial_wait=0.001), on_failed="mask")
    function = ScoringFunction(client, options=options)
    return await function(RewardSample("4", uid="u7"), reward_router_address=service.address)


@clients
@pytest.mark.parametrize(
    "text",
    [
        "Request too large for gpt-5 on tokens per min (TPM): Limit 30000, Requested 40000. Please try again in 1ms.",
        "Quota exceeded for metric: free_tier_requests, limit: 0",
        "Rate limit reached on requests per day (RPD): Limit 200, Used 200. Please try again in 7m12s.",
    ],
    ids=["too large", "limit 0", "per day"],
)
async def test_a_refusal_that_no_pause_cures_is_final_after_one_request(client: Any, text: str, service: Any) -> None:
    service.refusals = [message(text)] * 50
    result = await scored(client, service)
    assert result.outcome is Outcome.FAILED
    assert len(service.times) == 1
    assert client is by_httpx or text.partition(":")[0] in str(result.error)


@clients
@pytest.mark.parametrize(
    "body",
    [
        '{"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}',
        '{"error": {"message": "Your credit balance is too low to access the API."}}',
    ],
    ids=["quota", "credit"],
)
async def test_a_refusal_for_want_of_money_stops_the_run_after_one_request(
    client: Any, body: str, service: Any
) -> None:
    service.refusals = [body] * 50
    with pytest.raises(RewardLoopError, match=r"sample u7: .* no credit left, so the run stops"):
        await scored(client, service)
    assert len(service.times) == 1


@clients
@pytest.mark.parametrize(
    "body",
    [
        '{"error": {"code": 429, "details": [{"retryDelay": "0.3s"}]}}',
        message("Rate limit reached on tokens per min (TPM): Limit 30000. Please try again in 300ms."),
        '{"error": {"code": 429, "metadata": {"headers": {"X-RateLimit-Reset-Requests": "300ms"}}}}',
    ],
    ids=["retryDelay", "words", "metadata"],
)
async def test_a_pause_that_only_the_body_names_is_waited_for(client: Any, body: str, service: Any) -> None:
    service.refusals = [body] * 2
    assert (await hastened(scored(client, service))).score == 1
    assert len(service.times) == 3
    assert min(later - sooner for sooner, later in zip(service.times, service.times[1:], strict=False)) >= 0.3
