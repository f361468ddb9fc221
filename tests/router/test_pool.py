from __future__ import annotations

import asyncio

import pytest

from reward_loop.router import pool as pool_module
from reward_loop.router.backend import AsleepError, Backend, Route
from reward_loop.router.config import BackendConfig, RouterConfig
from reward_loop.router.pool import BackendPool
from tests.support.servers import until

URLS = ["http://a:1", "http://b:1", "http://c:1"]
BACKENDS = [BackendConfig(url=url) for url in URLS]


class Health:
    """A probe that tests open and close, URL by URL."""

    def __init__(self, *well: str) -> None:
        self.well = {url: asyncio.Event() for url in URLS}
        self.failing: set[str] = set()
        self.probes: list[str] = []
        for url in well:
            self.well[url].set()

    async def __call__(self, backend: Backend) -> None:
        url = backend.url
        self.probes.append(url)
        if url in self.failing:
            self.failing.remove(url)
            raise ConnectionRefusedError("nobody there")
        await self.well[url].wait()


async def test_an_unhealthy_backend_gets_no_requests_until_its_probe_succeeds() -> None:
    health = Health(*URLS[:2])
    async with BackendPool(BACKENDS[:2], health) as pool:
        first, second = await pool.acquire(), await pool.acquire()
        health.well[first.url].clear()
        pool.mark_unhealthy(first, "connection reset")
        assert first not in [await pool.acquire() for _ in range(4)]
        assert (first.up, first.last_error) == (False, "connection reset")
        assert "connection reset" in pool.describe()
        health.well[first.url].set()
        health.well[second.url].clear()
        pool.mark_dead(second, "its process died")
        assert await pool.acquire() is first


async def test_a_server_that_stays_unhealthy_is_logged_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_FIRST_PAUSE_S", 0.0)
    reasons = iter(["wrong port"] * 5 + ["bad certificate"] * 5)
    ended = asyncio.Event()

    async def check(backend: Backend) -> None:
        if (reason := next(reasons, None)) is None:
            ended.set()
            return
        raise ConnectionRefusedError(reason)

    async with BackendPool(BACKENDS[:1], check), asyncio.timeout(30):
        await ended.wait()
    lines = [message for message in caplog.messages if "is not healthy" in message]
    assert len(lines) == 2
    assert "wrong port" in lines[0]
    assert "bad certificate" in lines[1]


async def test_models_that_are_asked_alternately_take_turns_each() -> None:
    async def well(backend: Backend) -> None:
        pass

    backends = [BackendConfig(url=f"http://h:{number}", models=(model,)) for number, model in enumerate("abab", 1)]
    async with BackendPool(backends, well) as pool:
        await until(lambda: all(backend.up for backend in pool.backends))
        asked = {(await pool.acquire(Route(model))).url for model in "abab"}
    assert len(asked) == 4


async def test_failures_in_a_row_take_a_backend_out_and_after_an_outage_one_is_enough() -> None:
    async with BackendPool(BACKENDS[:1], Health(*URLS)) as pool:
        backend = await pool.acquire()
        for _ in range(4):
            pool.failed(backend, "status 500")
        pool.succeeded(backend)
        for _ in range(4):
            pool.failed(backend, "status 500")
        assert backend.up
        pool.failed(backend, "status 500")
        assert not backend.up
        assert await pool.acquire() is backend
        pool.failed(backend, "status 500")
        assert (backend.up, backend.outages) == (False, 2)
        assert await pool.acquire() is backend
        pool.succeeded(backend)
        pool.failed(backend, "status 500")
        assert (backend.up, backend.outages) == (True, 0)


async def test_outages_in_a_row_are_followed_by_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def counted(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(pool_module.asyncio, "sleep", counted)
    async with BackendPool(BACKENDS[:1], Health(*URLS)) as pool:
        for _ in range(9):
            pool.mark_unhealthy(await pool.acquire(), "connection reset")
        await pool.acquire()
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


async def test_a_backend_in_use_that_falls_asleep_is_noticed() -> None:
    asleep = asyncio.Event()

    async def check(backend: Backend) -> None:
        if asleep.is_set():
            raise AsleepError("the engine sleeps")

    async with BackendPool(BACKENDS[:1], check, RouterConfig(health_interval_s=0.01)) as pool:
        backend = await pool.acquire()
        asleep.set()
        await until(lambda: not backend.up)
        assert "sleeps" in (backend.last_error or "")
        asleep.clear()
        assert await pool.acquire() is backend


async def test_one_failed_check_is_not_enough() -> None:
    checks = []

    async def check(backend: Backend) -> None:
        checks.append(backend.failed_checks)
        if 1 < len(checks) <= 4:
            raise ValueError("status 503")

    async with BackendPool(BACKENDS[:1], check, RouterConfig(health_interval_s=0.01, max_failed_checks=3)) as pool:
        backend = await pool.acquire()
        await until(lambda: backend.ejections == 1 and backend.up)
    assert checks[:4] == [0, 0, 1, 2]
    assert backend.ejections == 1


@pytest.mark.parametrize("answers_requests", [True, False])
async def test_a_check_that_times_out_counts_unless_the_server_answers_requests(answers_requests: bool) -> None:
    checks: list[Backend] = []

    async def check(backend: Backend) -> None:
        checks.append(backend)
        if len(checks) > 1:
            backend.upstream.reads += answers_requests
            await asyncio.Event().wait()

    options = RouterConfig(health_interval_s=0.01, health_timeout_s=0.01, max_failed_checks=2)
    async with BackendPool(BACKENDS[:1], check, options) as pool:
        backend = await pool.acquire()
        await until(lambda: len(checks) > 5)
        assert backend.up is answers_requests


async def test_a_check_that_timed_out_is_repeated_without_waiting_for_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = RouterConfig(health_interval_s=0.01, health_timeout_s=0.01, max_failed_checks=2)
    checks: list[Backend] = []

    async def check(backend: Backend) -> None:
        checks.append(backend)
        if len(checks) > 1:
            monkeypatch.setitem(vars(options), "health_interval_s", 3600.0)  # only the first check waits for 0.01 s
            await asyncio.Event().wait()

    async with BackendPool(BACKENDS[:1], check, options) as pool:
        backend = await pool.acquire()
        await until(lambda: not backend.up)


async def test_a_server_that_answers_nothing_is_out_of_use_until_its_engine_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = asyncio.Event()
    asked: list[str] = []

    async def ask(backend: Backend) -> None:
        asked.append(backend.url)
        await answers.wait()

    monkeypatch.setattr(pool_module, "ask_for_one_token", ask)
    monkeypatch.setattr(pool_module, "_ONE_TOKEN_S", 0.05)
    options = {"health_interval_s": 0.01, "health_timeout_s": 0.1}
    async with BackendPool(BACKENDS[:1], Health(*URLS), RouterConfig(**options)) as pool, asyncio.timeout(30):
        backend = await pool.acquire()
        for _ in range(2):
            pool.unanswered(backend)
        await asyncio.sleep(0.1)
        assert not asked
        pool.unanswered(backend)
        assert await pool.next_hung() == [backend.url]
        assert "answered none of 3 requests in a row" in pool.describe()
        waiting = asyncio.create_task(pool.acquire())
        await until(lambda: len(asked) >= 3)  # health checks that succeed are not enough
        assert not waiting.done()
        answers.set()
        assert await waiting is backend
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.next_hung(), 0.3)


async def test_an_overloaded_server_stays_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(backend: Backend) -> None:
        asked.set()
        backend.upstream.reads += 1  # it answers another request
        await asyncio.Event().wait()

    asked = asyncio.Event()
    monkeypatch.setattr(pool_module, "ask_for_one_token", ask)
    monkeypatch.setattr(pool_module, "_ONE_TOKEN_S", 0.01)
    async with BackendPool(BACKENDS[:1], Health(*URLS)) as pool, asyncio.timeout(30):
        backend = await pool.acquire()
        for _ in range(10):  # each third request is answered
            pool.unanswered(backend)
            pool.unanswered(backend)
            backend.upstream.reads += 1
        await asyncio.sleep(0.05)
        assert not asked.is_set()
        for _ in range(3):
            pool.unanswered(backend)
        await asked.wait()
        await until(lambda: backend.unanswered == 0)
        assert backend.up
