from __future__ import annotations

import asyncio

import anyio
import pytest

from reward_loop.router.pool import NoWorkerError, WorkerPool, WorkerState

URLS = ["http://a:1", "http://b:1", "http://c:1"]


class Health:
    """A probe that tests open and close, URL by URL."""

    def __init__(self, *well: str) -> None:
        self.well = {url: asyncio.Event() for url in URLS}
        self.failing: set[str] = set()
        self.probes: list[str] = []
        for url in well:
            self.well[url].set()

    async def __call__(self, url: str) -> None:
        self.probes.append(url)
        if url in self.failing:
            self.failing.remove(url)
            raise ConnectionRefusedError("nobody there")
        await self.well[url].wait()


async def test_workers_take_turns() -> None:
    async with WorkerPool(URLS, Health(*URLS)) as pool:
        turns = [(await pool.acquire()).url for _ in range(6)]
    assert sorted(turns[:3]) == URLS
    assert turns[:3] == turns[3:]


async def test_a_request_waits_for_the_first_worker_that_is_well() -> None:
    health = Health()
    async with WorkerPool(URLS, health) as pool:
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0)
        assert not pool.usable
        health.well["http://b:1"].set()
        assert (await waiting).url == "http://b:1"
        assert pool.usable


async def test_an_ejected_worker_gets_no_requests_until_its_probe_succeeds() -> None:
    health = Health(*URLS[:2])
    async with WorkerPool(URLS[:2], health) as pool:
        first, second = await pool.acquire(), await pool.acquire()
        health.well[first.url].clear()
        pool.eject(first, "connection reset")
        assert first not in [await pool.acquire() for _ in range(4)]
        assert (first.state, first.last_error) == (WorkerState.DOWN, "connection reset")
        assert "connection reset" in pool.describe()
        health.well[first.url].set()
        pool.retire(second, "to have nobody else")
        assert await pool.acquire() is first


async def test_a_probe_that_fails_is_repeated() -> None:
    health = Health(URLS[0])
    health.failing.add(URLS[0])
    async with WorkerPool(URLS[:1], health) as pool:
        worker = await pool.acquire()
    assert health.probes == [URLS[0]] * 2
    assert worker.last_error == "ConnectionRefusedError: nobody there"


async def test_when_all_are_retired_requests_fail_at_once_with_the_reasons() -> None:
    async with WorkerPool(URLS[:2], Health()) as pool:
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0)
        pool.retire(pool.workers[0], "out of memory")
        pool.retire(pool.workers[1], "no such model")
        with pytest.raises(NoWorkerError, match=r"a:1 is retired \(out of memory\); http://b:1 is .*no such model"):
            await waiting
        pool.eject(pool.workers[0], "connection reset")
        assert pool.workers[0].state is WorkerState.RETIRED


async def test_burying_gives_up_what_waits_for_the_dead() -> None:
    async with WorkerPool(URLS[:1], Health(URLS[0])) as pool:
        worker = await pool.acquire()
        with anyio.CancelScope() as attempt:
            worker.attempts.add(attempt)
            asyncio.get_running_loop().call_soon(pool.bury, worker, "killed")
            await asyncio.Event().wait()
        assert attempt.cancelled_caught
        assert worker.last_error == "killed"


async def test_leaving_ends_the_probes() -> None:
    async with WorkerPool(URLS, Health()):
        await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("probe")]
