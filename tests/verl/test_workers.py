from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import RewardLoopError
from reward_loop.managers.groups import CALLER, Caller
from reward_loop.verl.run.job import RunningJob
from reward_loop.verl.workers import reward_workers
from reward_loop.verl.workers.reward_workers import MAX_TASK_RETRIES, RewardClient, RewardWorkers
from tests.support.clock import until
from tests.verl.rollouts import rollout
from tests.verl.trainers import NoJob

pytestmark = pytest.mark.integration

Settings = Callable[..., Any]
ONE_WORKER = "reward.num_workers=1"


@pytest.fixture
def job(cluster: None) -> Iterator[RunningJob]:
    running = RunningJob(RewardLoopConfig(), 120.0)
    yield running
    running.close()


def started(settings: Any, job: RunningJob) -> RewardWorkers:
    workers = RewardWorkers(settings, None, job)
    workers.wait_until_ready()
    return workers


KILLER = """
import os, pathlib, signal
def compute_score(solution_str, flag):
    kills, path = int(solution_str.split()[0]), pathlib.Path(flag)
    done = len(path.read_text()) if path.exists() else 0
    if done < kills:
        path.write_text("x" * (done + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
"""


async def test_a_worker_that_dies_is_replaced_and_its_samples_are_scored_again(
    job: RunningJob, with_function: Settings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flag = tmp_path / "flag"
    workers = started(with_function(KILLER, ONE_WORKER, flag=flag), job)
    # Ray would keep arguments over 100 KB in its object store, and print that a restart fails once they are lost.
    assert "constructor arguments in the object store" not in capfd.readouterr().err
    once = await workers.client.compute_score.remote(rollout("1 death"))
    assert once["reward_extra_info"]["reward_outcome"] == "scored"
    always = await workers.client.compute_score.remote(rollout("99 deaths"))
    assert always["reward_extra_info"]["reward_outcome"] == "failed"
    assert f"died {MAX_TASK_RETRIES + 1} times" in always["reward_extra_info"]["reward_error"]
    flag.write_text("x" * 99)
    job.check()
    batch = [rollout(f"{i} deaths") for i in range(5)]
    rewards = await asyncio.to_thread(workers.score_batch, batch)
    assert [reward["reward_score"] for reward in rewards] == [1.0] * 5


SHARES = """
import os, pathlib, signal
class compute_score:
    def __init__(self, flag):
        self.flag = pathlib.Path(flag)
    def compute_score(self, solution_str):
        if solution_str == "dies" and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return None if solution_str == "none" else 1.0
    def post_process_scores(self, scores):
        return [score / len(scores) for score in scores]
"""


async def test_a_group_whose_worker_dies_does_not_wait_for_the_samples_that_have_left_it(
    job: RunningJob, with_function: Settings, tmp_path: Path
) -> None:
    workers = started(with_function(SHARES, ONE_WORKER, "actor_rollout_ref.rollout.n=4", flag=tmp_path / "flag"), job)
    left, *others = (rollout(text, uid="q", session_id=i) for i, text in enumerate(("none", "dies", "a", "b")))
    with workers.client.prompt("q", 4):
        first = await workers.client.remote(left)
        assert first["reward_extra_info"]["reward_outcome"] == "unscored"
        rewards = await asyncio.gather(*map(workers.client.remote, others))
    assert [reward["reward_score"] for reward in rewards] == [1 / 3] * 3


STARTS_ONCE = """
import os, pathlib, signal
class Judge:
    def __init__(self, folder):
        (pathlib.Path(folder) / "port").touch(exist_ok=False)

    def compute_score(self, solution_str):
        os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_worker_that_cannot_start_again_ends_the_run(
    job: RunningJob, with_function: Settings, tmp_path: Path
) -> None:
    options = (ONE_WORKER, "custom_reward_function.name=Judge")
    workers = started(with_function(STARTS_ONCE, *options, folder=tmp_path), job)
    ends = partial(pytest.raises, RewardLoopError, match="(?s)reward worker.* did not start.*FileExistsError")
    with ends():
        await workers.client.compute_score.remote(rollout("4"))
    with ends():
        job.check()


HANGS = """
import threading
def compute_score(solution_str):
    if solution_str == "hang":
        threading.Event().wait()
    return 1.0
"""


def test_a_batch_whose_rewards_do_not_come_is_not_awaited_for_ever(
    job: RunningJob, with_function: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = started(with_function(HANGS, ONE_WORKER, "reward_loop.timeout=null"), job)
    workers.score_batch([rollout("1")])
    workers._stall_timeout_s = 1.0
    monkeypatch.setattr(reward_workers, "CHECK_S", 0.2)
    with pytest.raises(RewardLoopError, match=r"1 of 2 rewards are missing.*stall_timeout_s=1\)"):
        workers.score_batch([rollout("1"), rollout("hang")])


BLOCKS = """
import pathlib, time
async def compute_score(solution_str, flags):
    flags = pathlib.Path(flags)
    (flags / "blocked").touch()
    while not (flags / "free").exists():
        time.sleep(0.02)
    return 1.0
"""


async def test_a_worker_whose_event_loop_is_blocked_is_busy_and_not_lost(
    job: RunningJob,
    with_function: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers = started(with_function(BLOCKS, ONE_WORKER, flags=tmp_path), job)
    reward = asyncio.ensure_future(workers.client.compute_score.remote(rollout("1")))
    await until((tmp_path / "blocked").exists)
    job.check()  # does not wait for the worker
    workers.client.options = workers.client.options.model_copy(update={"worker_answer_timeout_s": 0.3})
    with pytest.raises(RewardLoopError, match=r"did not answer within 0\.3 s \(reward_loop\.worker_answer_timeout_s\)"):
        workers._need_groups()
    (tmp_path / "free").touch()
    assert (await reward)["reward_score"] == 1.0


RANKS = """
def compute_score(solution_strs, extra_infos):
    lengths = sorted(map(len, solution_strs))
    return [lengths.index(len(text)) for text in solution_strs]
"""
GROUPS = ("reward_model.reward_manager=group", "reward_loop.group.timeout=300", "actor_rollout_ref.rollout.n=3")


async def test_a_group_meets_in_one_of_several_workers(job: RunningJob, with_function: Settings) -> None:
    workers = started(with_function(RANKS, "reward.num_workers=2", *GROUPS), job)
    rows = [rollout("x" * length, uid=f"q{q}", session_id=length) for length in (1, 2, 3) for q in range(6)]
    rows.append(rollout("x", uid="validation", group_size=1, __validate__=True))
    rewards = await asyncio.gather(*(workers.client.compute_score.remote(row) for row in rows))
    assert [reward["reward_score"] for reward in rewards] == [0] * 6 + [1] * 6 + [2] * 6 + [0]
    batch = await asyncio.to_thread(workers.score_batch, rows)
    assert [reward["reward_score"] for reward in batch] == [reward["reward_score"] for reward in rewards]


async def test_a_sample_that_waits_for_its_group_is_not_in_flight(job: RunningJob, with_function: Settings) -> None:
    """Otherwise the others, without a place, could never be scored."""
    workers = started(with_function(RANKS, ONE_WORKER, *GROUPS), job)
    places = asyncio.Semaphore(1)

    async def judged(length: int) -> float:
        await places.acquire()
        CALLER.set(Caller(release=places.release))
        reward = await workers.client.compute_score.remote(rollout("x" * length, uid="q", session_id=length))
        return reward["reward_score"]

    with workers.client.prompt("q", 3):
        assert await asyncio.gather(*map(judged, (1, 2, 3))) == [0, 1, 2]


async def test_samples_are_distributed_in_turn(with_function: Settings) -> None:
    async def answer(number: int, _: Any) -> int:
        return number

    handles = [SimpleNamespace(compute_score=SimpleNamespace(remote=partial(answer, n))) for n in range(2)]
    client = RewardClient(handles, with_function(None).options, NoJob().handle)
    assert [await client.compute_score.remote(None) for _ in range(4)] == [0, 1, 0, 1]
    client.by_group = True
    numbers = {uid: {await client.compute_score.remote(rollout("4", uid=uid)) for _ in range(4)} for uid in "abcdefgh"}
    assert all(len(of_prompt) == 1 for of_prompt in numbers.values())
    assert set.union(*numbers.values()) == {0, 1}
