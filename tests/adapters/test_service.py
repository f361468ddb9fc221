"""Bounds on samples in flight, clients that disconnect, and the end of the service."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import httpx
import pytest

from reward_loop.adapters.service.app import create_app
from reward_loop.adapters.service.replies import ServiceError
from reward_loop.adapters.service.service import LINE_S, RewardService
from reward_loop.types import RewardSample
from tests.adapters.services import client_of, post, scorer
from tests.clock import advance
from tests.servers import serving, until


class Held:
    """An async function whose calls wait until `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.started: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()

    async def compute_score(self, solution_str: str) -> float:
        self.started.put_nowait(solution_str)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.put_nowait(solution_str)
            raise
        return 1.0


async def test_requests_beyond_the_samples_in_flight_are_refused_until_there_is_room() -> None:
    held = Held()
    async with client_of(scorer(held.compute_score), concurrency=1, max_in_flight=2) as client:
        body = {"samples": [{"solution_str": "a"}, {"solution_str": "b"}]}
        first = asyncio.create_task(post(client, "/score", body))
        assert await held.started.get() == "a"
        answer = await client.post("/score", json={"solution_str": "c"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert "2 samples are in flight" in answer.json()["error"]
        too_many = {"samples": [{"solution_str": "a"}] * 3}
        assert "has 3 samples, and at most 2" in (await post(client, "/score", too_many, 413))["error"]
        held.release.set()
        assert [result["score"] for result in (await first)["results"]] == [1, 1]
        assert (await post(client, "/score", {"solution_str": "c"}))["score"] == 1


async def test_a_client_that_disconnects_cancels_its_samples_only() -> None:
    held = Held()
    service = RewardService(scorer(held.compute_score), concurrency=2)
    async with service, serving(create_app(service)) as url, aiohttp.ClientSession(url) as session:

        async def ask(response: str) -> Any:
            body = {"prompt": "", "response": response, "label": None}
            async with session.post("/slime", json=body) as answer:
                return await answer.json()

        leaves, stays = asyncio.create_task(ask("leaves")), asyncio.create_task(ask("stays"))
        assert {await held.started.get(), await held.started.get()} == {"leaves", "stays"}
        leaves.cancel()
        assert await held.cancelled.get() == "leaves"
        held.release.set()
        assert await stays == 1.0
        assert held.cancelled.empty()
    assert service.in_flight == 0


@pytest.fixture
async def accepted() -> AsyncIterator[Any]:
    """Start a service that has accepted the sample ``a``; return it, its function and the result."""
    held = Held()
    async with AsyncExitStack() as stack:

        async def start(**options: Any) -> tuple[RewardService, Held, asyncio.Task[Any]]:
            service = await stack.enter_async_context(RewardService(scorer(held.compute_score), **options))
            score = asyncio.create_task(service.score([RewardSample("a")], path="/score"))
            await held.started.get()
            return service, held, score

        yield start


async def test_samples_in_flight_end_after_a_signal_and_new_ones_are_refused(accepted: Any) -> None:
    service, held, score = await accepted(grace_s=600)
    ended: list[int] = []
    service.stop_from_signal(lambda: ended.append(service.in_flight))
    await until(lambda: service.stopping)
    with pytest.raises(ServiceError, match="stopping") as refused:
        await service.score([RewardSample("b")], path="/score")
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
    app = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=app, base_url="http://localhost") as client:
        assert [(await client.get(path)).status_code for path in ("/ready", "/health")] == [503, 200]
    assert ended == []
    held.release.set()
    assert [result.score for result in await score] == [1.0]
    assert ended == [0]


@pytest.mark.parametrize("grace_s", [0, 600])
async def test_after_the_grace_period_or_a_second_signal_samples_are_cancelled(accepted: Any, grace_s: int) -> None:
    service, held, score = await accepted(grace_s=grace_s)
    service.stop_from_signal(lambda: None)
    if grace_s:
        service.stop_from_signal(lambda: None)
    with pytest.raises(ServiceError, match="stopped before all samples were scored") as stopped:
        await score
    assert stopped.value.status == 503
    assert await held.cancelled.get() == "a"
    assert service.in_flight == 0


async def test_a_failure_is_logged_once_for_each_cause(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with client_of() as client:
            for _ in range(3):
                await post(client, "/score", {"solution_str": "raise", "ground_truth": "4"})
    assert [record.message.count("ValueError: five") for record in caplog.records] == [1]


async def test_samples_without_a_score_are_counted_in_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of() as client:
        for answer in ("raise", "raise", "nan", "none"):
            await post(client, "/score", {"solution_str": answer, "ground_truth": "4"})
        caplog.clear()
        await advance(LINE_S)
        await post(client, "/score", {"solution_str": "4", "ground_truth": "4"})
        (line,) = [record.message for record in caplog.records]
        counts = "3 failed and 1 unscored of 5 samples; the most frequent of 3 causes, 2 times: ValueError in equals "
        assert re.match(rf"in the last 6\d s: {counts}", line)
        await advance(LINE_S)
        await post(client, "/score", {"solution_str": "4", "ground_truth": "4"})
        assert len(caplog.records) == 1  # nothing has failed since the last line


async def test_too_many_failures_are_an_error_if_the_user_sets_the_bound() -> None:
    made = scorer(max_failed_share=0.5, min_samples_for_failed_share=2)
    async with client_of(made) as client:
        body = {"solution_str": "raise", "ground_truth": "4"}
        assert (await post(client, "/score", body))["outcome"] == "failed"
        assert "max_failed_share" in (await post(client, "/score", body, 500))["error"]
        assert (await post(client, "/score", {**body, "solution_str": "4"}))["score"] == 1
