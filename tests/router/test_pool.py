from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from reward_loop.router.backend import Worker, WorkerState
from reward_loop.router.config import RouterConfig, WorkerConfig
from reward_loop.router.pool import AllRestError, AsleepError, NoWorkerError, WorkerPool
from tests.servers import until

URLS = ["http://a:1", "http://b:1", "http://c:1"]
WORKERS = [WorkerConfig(url=url) for url in URLS]


class Health:
    """A probe that tests open and close, URL by URL."""

    def __init__(self, *well: str) -> None:
        self.well = {url: asyncio.Event() for url in URLS}
        self.failing: set[str] = set()
        self.probes: list[str] = []
        for url in well:
            self.well[url].set()

    async def __call__(self, worker: Worker) -> None:
        url = worker.url
        self.probes.append(url)
        if url in self.failing:
            self.failing.remove(url)
            raise ConnectionRefusedError("nobody there")
        await self.well[url].wait()


async def test_workers_take_turns() -> None:
    async with WorkerPool(WORKERS, Health(*URLS)) as pool:
        turns = [(await pool.acquire()).url for _ in range(6)]
    assert sorted(turns[:3]) == URLS
    assert turns[:3] == turns[3:]


async def test_a_request_waits_for_the_first_worker_that_is_well() -> None:
    health = Health()
    async with WorkerPool(WORKERS, health) as pool:
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0)
        assert not pool.usable
        health.well["http://b:1"].set()
        assert (await waiting).url == "http://b:1"
        assert pool.usable


async def test_an_ejected_worker_gets_no_requests_until_its_probe_succeeds() -> None:
    health = Health(*URLS[:2])
    async with WorkerPool(WORKERS[:2], health) as pool:
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
    async with WorkerPool(WORKERS[:1], health) as pool:
        worker = await pool.acquire()
    assert health.probes == [URLS[0]] * 2
    assert worker.last_error == "ConnectionRefusedError: nobody there"


async def test_when_all_are_retired_requests_fail_at_once_with_the_reasons() -> None:
    async with WorkerPool(WORKERS[:2], Health()) as pool:
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0)
        pool.retire(pool.workers[0], "out of memory")
        pool.retire(pool.workers[1], "no such model")
        with pytest.raises(NoWorkerError, match=r"a:1 is retired \(out of memory\); http://b:1 is .*no such model"):
            await waiting
        pool.eject(pool.workers[0], "connection reset")
        assert pool.workers[0].state is WorkerState.RETIRED


async def test_burying_takes_a_worker_out_of_use() -> None:
    async with WorkerPool(WORKERS[:1], Health(URLS[0])) as pool:
        worker = await pool.acquire()
        pool.bury(worker, "killed")
        assert (worker.state, worker.last_error) == (WorkerState.DOWN, "killed")


async def test_leaving_ends_the_probes() -> None:
    async with WorkerPool(WORKERS, Health()):
        await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("watch")]


async def on_trial(pool: WorkerPool) -> Worker:
    """Of two servers, the first, which was down and has its first request since."""
    first = await pool.acquire()
    await pool.acquire()
    pool.eject(first, "connection reset")
    await until(lambda: first.state is WorkerState.TRIAL)
    assert await pool.acquire() is first
    first.in_flight = 1
    return first


async def test_a_worker_that_was_down_gets_one_request_at_a_time_until_one_succeeds() -> None:
    async with WorkerPool(WORKERS[:2], Health(*URLS)) as pool:
        first = await on_trial(pool)
        assert first not in [await pool.acquire() for _ in range(4)]
        pool.succeeded(first)
        assert first in [await pool.acquire() for _ in range(2)]
        assert first.state is WorkerState.UP


async def test_a_worker_whose_trial_takes_long_gets_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_loop.router.pool._TRIAL_S", -1.0)
    async with WorkerPool(WORKERS[:2], Health(*URLS)) as pool:
        await on_trial(pool)
        shares = Counter([(await pool.acquire()).url for _ in range(20)])
    assert max(shares.values()) <= 11


async def test_models_that_are_asked_alternately_take_turns_each() -> None:
    async def well(worker: Worker) -> None:
        pass

    workers = [WorkerConfig(url=f"http://h:{number}", models=(model,)) for number, model in enumerate("abab", 1)]
    async with WorkerPool(workers, well) as pool:
        await until(lambda: {worker.state for worker in pool.workers} == {WorkerState.UP})
        asked = {(await pool.acquire(model)).url for model in "abab"}
    assert len(asked) == 4


async def test_failures_in_a_row_take_a_worker_out_and_one_on_trial_at_once() -> None:
    async with WorkerPool(WORKERS[:1], Health(*URLS), RouterConfig(max_failures=3)) as pool:
        worker = await pool.acquire()
        for _ in range(2):
            pool.failed(worker, "status 500")
        pool.succeeded(worker)
        for _ in range(2):
            pool.failed(worker, "status 500")
        assert worker.state is WorkerState.UP
        pool.failed(worker, "status 500")
        assert worker.state is WorkerState.DOWN
        assert await pool.acquire() is worker
        assert worker.state is WorkerState.TRIAL
        pool.failed(worker, "status 500")
        assert (worker.state, worker.relapses) == (WorkerState.DOWN, 1)


async def test_resting_workers_are_left_alone_and_come_back_by_themselves() -> None:
    async with WorkerPool(WORKERS[:2], Health(*URLS)) as pool:
        first, second = await pool.acquire(), await pool.acquire()
        pool.rest(first, 600)
        assert first not in [await pool.acquire() for _ in range(4)]
        pool.rest(second, 900)
        with pytest.raises(AllRestError) as raised:
            await pool.acquire()
        assert 0 < raised.value.seconds <= 600
    async with WorkerPool(WORKERS[:1], Health(*URLS)) as pool:
        worker = await pool.acquire()
        pool.rest(worker, 0.05)
        await until(lambda: pool.pick(pool.group()) is worker)


async def test_a_drained_worker_gets_nothing_until_it_is_resumed() -> None:
    async with WorkerPool(WORKERS[:2], Health(*URLS)) as pool:
        first = await pool.acquire()
        second = await pool.acquire()
        pool.drain(first)
        assert {await pool.acquire() for _ in range(4)} == {second}
        pool.drain(second)
        with pytest.raises(NoWorkerError, match="a:1 is draining"):
            await pool.acquire()
        pool.resume(first)
        assert await pool.acquire() is first
        pool.remove(first)
        assert pool.workers == [second]


async def test_workers_are_added_while_it_runs() -> None:
    async with WorkerPool([], Health(*URLS)) as pool:
        with pytest.raises(NoWorkerError, match="none was configured"):
            await pool.acquire()
        worker = pool.add(WORKERS[2])
        assert await pool.acquire() is worker
        assert pool.find("http://c:1/") is worker
        assert pool.find("http://d:1") is None


async def test_requests_go_by_model_and_kind() -> None:
    configs = [
        WorkerConfig(url=URLS[0], models=("judge",), kind="generative"),
        WorkerConfig(url=URLS[1], models=("scorer",), kind="discriminative"),
        WorkerConfig(url=URLS[2]),
    ]
    async with WorkerPool(configs, Health(*URLS)) as pool:
        assert pool.several_models
        assert pool.models == {"judge", "scorer"}

        def urls(*route: str | None) -> list[str]:
            return [worker.url for worker in pool.group(*route).members]  # type: ignore[arg-type]

        assert urls("judge") == [URLS[0], URLS[2]]
        assert urls(None, "discriminative") == [URLS[1], URLS[2]]
        assert urls("judge", "discriminative") == urls("unheard of") == [URLS[2]]


async def test_a_worker_in_use_that_falls_asleep_is_noticed() -> None:
    asleep = asyncio.Event()

    async def check(worker: Worker) -> None:
        if asleep.is_set():
            raise AsleepError("the engine sleeps")

    async with WorkerPool(WORKERS[:1], check, RouterConfig(health_interval_s=0.01)) as pool:
        worker = await pool.acquire()
        asleep.set()
        await until(lambda: worker.state is WorkerState.DOWN)
        assert "sleeps" in (worker.last_error or "")
        asleep.clear()
        assert await pool.acquire() is worker


async def test_one_failed_check_is_not_enough() -> None:
    checks = []

    async def check(worker: Worker) -> None:
        checks.append(worker.failed_checks)
        if 1 < len(checks) <= 4:
            raise ValueError("status 503")

    async with WorkerPool(WORKERS[:1], check, RouterConfig(health_interval_s=0.01, max_failed_checks=3)) as pool:
        worker = await pool.acquire()
        await until(lambda: worker.state is WorkerState.TRIAL)
    assert checks[:4] == [0, 0, 1, 2]
    assert worker.stats.ejections == 1


async def test_requests_for_a_sleeping_worker_wait_until_it_is_resumed() -> None:
    async with WorkerPool(WORKERS[:1], Health(*URLS)) as pool:
        worker = await pool.acquire()
        worker.in_flight = 1
        sleeping = asyncio.create_task(pool.sleep(worker))
        await until(lambda: worker.state is WorkerState.ASLEEP)
        assert not sleeping.done()
        pool.bury(worker, "it dies in its sleep")
        assert worker.state is WorkerState.ASLEEP
        worker.in_flight = 0
        worker.idle.set()
        await sleeping
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0)
        assert not pool.usable
        pool.resume(worker)
        assert await waiting is worker


async def test_workers_that_were_woken_together_share_what_comes() -> None:
    health = Health(*URLS[:2])
    async with WorkerPool(WORKERS[:2], health) as pool:
        both = {(await pool.acquire()).url for _ in range(2)}
        for worker in pool.workers:
            await pool.sleep(worker)
            health.well[worker.url].clear()  # checks take their time
        for worker in pool.workers:
            pool.resume(worker)
        assert {(await pool.acquire()).url for _ in range(2)} == both == set(URLS[:2])


@pytest.mark.parametrize("end", ["resume", "retire", "remove"])
async def test_who_waits_for_a_server_to_fall_asleep_hears_that_it_will_not(end: str) -> None:
    async with WorkerPool(WORKERS[:1], Health(*URLS)) as pool:
        worker = await pool.acquire()
        worker.begin()
        sleeping = asyncio.create_task(pool.sleep(worker))
        await until(lambda: worker.state is WorkerState.ASLEEP)
        getattr(pool, end)(worker, *(["gone"] if end == "retire" else []))
        async with asyncio.timeout(60):
            await sleeping
