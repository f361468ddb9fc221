"""What all workers of a job share in one actor: permits, budget, failures and reasons to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import BudgetSpentError, LimitError, RewardLoopError
from reward_loop.limits import Permit
from reward_loop.types import Outcome, RewardResult
from reward_loop.verl.run.job import Job, JobLimits, RunningJob
from tests.support.clock import until
from tests.verl.jobs import Handle

pytestmark = pytest.mark.integration  # imports Ray


def options(**judge: Any) -> RewardLoopConfig:
    return RewardLoopConfig(limits={"judge": judge} if judge else {})


def judge_of(job: Job) -> tuple[int, int]:
    """Return the calls in flight, and those that wait."""
    judge = job._limits.limiters["judge"]
    return judge.in_flight, judge.waiting


@pytest.mark.parametrize("lost", [(), ("call", "reply", "reply", "", "call") * 20], ids=["reachable", "unreachable"])
async def test_no_permit_is_lost_and_none_granted_twice(lost: tuple[str, ...]) -> None:
    job = Job(given := options(max_concurrent=4))
    workers = [JobLimits(Handle(job, lost), f"worker {number}", given) for number in range(3)]
    now = most = 0

    async def call(limits: JobLimits) -> None:
        nonlocal now, most
        permit = await limits.acquire("judge")
        now += 1
        most = max(most, now)
        await asyncio.sleep(random.random() / 1000)
        now -= 1
        permit.leave()

    await asyncio.gather(*(call(limits) for limits in workers for _ in range(50)))
    await asyncio.gather(*(limits.arrived() for limits in workers))
    assert most == 4
    assert judge_of(job) == (0, 0)


async def test_a_permit_that_is_free_takes_one_call() -> None:
    job = Job(given := options(max_concurrent=100))
    limits = JobLimits(handle := Handle(job), "worker", given)
    for _ in range(10):
        (await limits.acquire("judge")).leave()
        await limits.arrived()
    assert handle.calls["send"] == 20
    permits = await asyncio.gather(*(limits.acquire("judge") for _ in range(100)))  # those of one turn in one call
    assert handle.calls["send"] == 21
    assert handle.calls["events"] == 1
    assert len(permits) == 100


async def test_a_cancelled_call_gives_back_what_it_waits_for_or_has_got() -> None:
    job = Job(given := options(max_concurrent=1))
    limits = JobLimits(Handle(job), "worker", given)
    held = await limits.acquire("judge")
    waits = asyncio.create_task(limits.acquire("judge"))
    await until(lambda: judge_of(job) == (1, 1))
    waits.cancel()
    await until(lambda: judge_of(job) == (1, 0))
    granted = asyncio.create_task(limits.acquire("judge"))
    await until(lambda: judge_of(job) == (1, 1))
    held.leave()
    granted.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        (await granted).leave()
    await until(lambda: judge_of(job) == (0, 0))


async def test_what_a_dead_worker_held_ends_when_the_next_one_joins() -> None:
    job = Job(given := options(max_concurrent=2))
    dead, other = JobLimits(Handle(job), "worker", given), JobLimits(Handle(job), "other", given)
    await asyncio.gather(*(dead.acquire("judge") for _ in range(2)))
    waits = [asyncio.create_task(limits.acquire("judge")) for limits in (dead, other, other)]
    await until(lambda: judge_of(job) == (2, 3))
    after = JobLimits(Handle(job), "worker", given)
    permits: list[Permit] = await asyncio.gather(*waits[1:])
    with pytest.raises(LimitError, match="worker was replaced by another process"):
        await waits[0]
    with pytest.raises(LimitError, match="was replaced"):
        await dead.acquire("judge")
    assert judge_of(job) == (2, 0)
    for permit in permits:
        permit.leave()
    (await after.acquire("judge")).leave()
    await asyncio.gather(after.arrived(), other.arrived())
    assert judge_of(job) == (0, 0)


async def test_others_get_what_a_worker_holds_that_never_restarts() -> None:
    job = Job(given := options(max_concurrent=1))
    lost, other = JobLimits(Handle(job), "worker", given), JobLimits(Handle(job), "other", given)
    await lost.acquire("judge")
    waits = asyncio.create_task(other.acquire("judge"))
    await until(lambda: judge_of(job) == (1, 1))
    await job.lose("worker", 60.0)  # it was heard of since then
    assert judge_of(job) == (1, 1)
    await job.lose("worker", 0.0)
    await job.lose("worker", 0.0)
    (await waits).leave()
    with pytest.raises(LimitError, match="worker was replaced by another process, or was unreachable for too long"):
        await lost.acquire("judge")
    (await JobLimits(Handle(job), "worker", given).acquire("judge")).leave()


async def test_an_actor_that_stays_unreachable_is_lost() -> None:
    given = RewardLoopConfig(limits={"judge": {"max_concurrent": 1}}, worker_answer_timeout_s=0.05)
    limits = JobLimits(Handle(Job(given), ("call",) * 10**6), "worker", given)
    with pytest.raises(LimitError, match=r"lost after 0 s \(reward_loop\.worker_answer_timeout_s\): .*refused"):
        await limits.acquire("judge")
    with pytest.raises(LimitError, match="the limits of the job are lost"):
        await limits.arrived()


async def test_impossible_requests_are_errors() -> None:
    job = Job(given := options(tokens_per_minute=10))
    limits = JobLimits(Handle(job), "worker", given)
    with pytest.raises(LimitError, match=r"unknown limit 'jugde'; did you mean 'judge'\?"):
        await limits.acquire("jugde")
    with pytest.raises(LimitError, match="a call with 11 tokens exceeds tokens_per_minute=10"):
        await limits.acquire("judge", 11)


async def test_a_budget_is_that_of_all_workers() -> None:
    given = RewardLoopConfig(limits={"judge": {"max_concurrent": 1}}, budget={"max_tokens": 10})
    job = Job(given)
    first, second = JobLimits(Handle(job), "first", given), JobLimits(Handle(job), "second", given)
    held = await first.acquire("judge")
    waits = asyncio.create_task(second.acquire("judge"))
    await until(lambda: judge_of(job) == (1, 1))
    first.spend(1.5, 10)
    with pytest.raises(BudgetSpentError, match=r"10 of reward_loop\.budget\.max_tokens=10"):
        await waits
    held.leave()
    await first.arrived()
    late = JobLimits(Handle(job), "late", given)
    late.spend(0.5, 2)
    await late.arrived()
    assert first.spent == second.spent == late.spent != None  # noqa: E711
    assert await job.usage() == (2.0, 12)


async def test_the_first_reason_to_stop_stays_and_failures_of_all_workers_count_together() -> None:
    job = Job(given := RewardLoopConfig(min_samples_for_failed_share=6))
    workers = [JobLimits(Handle(job), f"worker {number}", given) for number in range(6)]
    failed = RewardResult(Outcome.FAILED, None, error="sample u1: the judge is \ud800 down")
    for number, limits in enumerate(workers):
        limits.count(failed if number < 4 else RewardResult(Outcome.SCORED, 1.0))
        await limits.arrived()
    assert await job.why_stopped() is None
    workers[0].count(failed)
    workers[0].stop("too late")
    await workers[0].arrived()
    why = str(await job.why_stopped())
    assert why.startswith("TooManyFailuresError: 5 of the last 7 samples failed")


async def test_samples_that_failed_without_a_worker_count_too() -> None:
    job = Job(RewardLoopConfig(min_samples_for_failed_share=2))
    for _ in range(2):
        assert await job.why_stopped() is None
        await job.count_failure("the reward worker died 4 times", "a reward worker died")
    assert "2 of the last 2 samples failed" in str(await job.why_stopped())


async def test_exchanges_of_all_workers_are_counted() -> None:
    job = Job(given := RewardLoopConfig())
    for number in range(2):
        counts = [{"calls": 0}, {"calls": 2, "without_verdict": 1, "seconds": [0.5, 1.0]}]
        limits = JobLimits(Handle(job), f"worker {number}", given, counts.pop)
        limits.spend(0, 1)
        await limits.arrived()
    assert await job.exchange_counts() == {"calls": 4, "without_verdict": 2, "seconds": [0.5, 1.0] * 2}
    assert (await job.exchange_counts())["calls"] == 0


async def test_a_failure_has_arrived_although_more_is_reported_all_the_time() -> None:
    job = Job(given := RewardLoopConfig(min_samples_for_failed_share=1))
    limits = JobLimits(Handle(job), "worker", given)

    async def others() -> None:
        while True:
            limits.spend(0, 1)
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    await until(lambda: limits._number > 10)
    limits.count(RewardResult(Outcome.FAILED, None, error="the judge is down"))
    async with asyncio.timeout(5):
        await limits.arrived()
    assert "the judge is down" in str(await job.why_stopped())
    running.cancel()
    async with asyncio.timeout(5):
        await limits.arrived()
        await limits.arrived()
    assert not limits._messages


# Ray's memory monitor kills a process that is never restarted with an error that is no `RayActorError`.
@pytest.mark.parametrize("death", [None, OutOfMemoryError("the node runs low on memory")], ids=["died", "memory"])
async def test_calls_fail_when_the_actor_has_died(death: Exception | None) -> None:
    job = Job(given := options(max_concurrent=1))
    limits = JobLimits(handle := Handle(job), "worker", given)
    held = await limits.acquire("judge")
    waits = asyncio.create_task(limits.acquire("judge"))
    await until(lambda: judge_of(job) == (1, 1))
    handle.die(death)
    with pytest.raises(LimitError, match="the limits of the job are lost"):
        await waits
    with pytest.raises(LimitError, match="the limits of the job are lost"):
        await limits.acquire("judge")
    held.leave()
    limits.stop("a reason that nobody reads")
    with pytest.raises(LimitError, match="the limits of the job are lost"):
        await limits.arrived()


class Asker:
    """A worker in Ray that holds permits for a while, again and again, and notes each in a folder meanwhile."""

    def __init__(self, job: str, name: str, given: RewardLoopConfig, folder: str) -> None:
        self._limits = JobLimits(ray.get_actor(job), name, given)
        self._folder = Path(folder)

    async def pid(self) -> int:
        return os.getpid()

    async def ask(self, calls: int, at_once: int) -> int:
        left = iter(range(calls))
        most = 0

        async def asks() -> None:
            nonlocal most
            for number in left:
                permit = await self._limits.acquire("judge")
                note = self._folder / f"{os.getpid()} {number}"
                note.touch()
                pids = [name.split()[0] for name in os.listdir(self._folder)]  # those of the killed process stay
                most = max(most, sum(Path("/proc", pid).exists() for pid in pids))
                await asyncio.sleep(0.002)
                note.unlink()
                permit.leave()

        await asyncio.gather(*(asks() for _ in range(at_once)))
        await self._limits.arrived()
        return most


def test_a_worker_that_is_killed_under_load_loses_no_permit(cluster: None, tmp_path: Path) -> None:
    given = options(max_concurrent=8)
    job = RunningJob(given, 60.0)
    actor = ray.remote(Asker).options(max_restarts=-1, max_task_retries=-1, max_concurrency=1000, num_cpus=0)
    askers = [actor.remote(job.name, f"worker {number}", given, str(tmp_path)) for number in range(3)]
    pid = ray.get(askers[0].pid.remote())
    calls = [asker.ask.remote(200, 20) for asker in askers]
    ray.wait(calls, timeout=0.3)
    os.kill(pid, signal.SIGKILL)
    most = ray.get(calls, timeout=120)
    assert max(most) <= 8
    judge = ray.get(job.handle.snapshot.remote())["limits"]["judge"]
    assert (judge["in_flight"], judge["waiting"]) == (0, 0)
    job.close()


def test_the_death_of_the_actor_ends_the_run_with_its_cause(cluster: None) -> None:
    job = RunningJob(given := options(max_concurrent=1), 60.0)
    limits = ray.remote(Asker).options(num_cpus=0).remote(job.name, "worker", given, "/nowhere")
    ray.get(limits.pid.remote())
    job.check()
    job.spend(1.0, 20)
    assert job.usage() == (1.0, 20)
    parked = job.handle.events.remote("worker", "life", 0)
    ray.kill(job.handle)  # does not wait
    ray.wait([parked])
    with pytest.raises(RewardLoopError, match=r"(?s)the limits and the failures of the run died.*resumes.*killed by"):
        job.check()
    with pytest.raises(ray.exceptions.RayTaskError, match="the limits of the job are lost"):
        ray.get(limits.ask.remote(1, 1))


@pytest.mark.parametrize("error", [OutOfMemoryError("the node runs low on memory"), None], ids=["memory", "alive"])
def test_what_the_trainer_says_when_the_actor_does_not_answer(
    cluster: None, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    job = RunningJob(options(max_concurrent=1), 60.0)

    def get(call: Any, timeout: float) -> Any:
        raise error or GetTimeoutError

    monkeypatch.setattr(ray, "get", get)
    said = "died.*resumes.*low on memory" if error else "did not answer within 60 s"
    with pytest.raises(RewardLoopError, match=f"(?s){said}"):
        job.check()
    ray.kill(job.handle)


async def test_twenty_thousand_samples_wait_at_the_same_time_and_the_oldest_comes_first() -> None:
    job = Job(given := options(max_concurrent=64))
    workers = [JobLimits(Handle(job), f"worker {number}", given) for number in range(8)]
    held = [await workers[0].acquire("judge") for _ in range(64)]
    ages = random.Random(0).sample(range(20_000), 20_000)
    calls = {age: asyncio.create_task(workers[age % 8].acquire("judge", order=(1.0, float(age)))) for age in ages}
    await until(lambda: judge_of(job) == (64, 20_000))
    for permit in held:
        permit.leave()
    for age in range(20_000):  # another order would wait for ever
        (await calls[age]).leave()
    await asyncio.gather(*(limits.arrived() for limits in workers))
    assert judge_of(job) == (0, 0)
