"""Reward workers whose node is lost, before Ray has detected it, without Ray."""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError, RayTaskError

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import LimitError, RewardFunctionError, RewardLoopError
from reward_loop.verl.workers.reward_workers import MAX_TASK_RETRIES, RewardClient, RewardWorkers
from tests.verl.rollouts import rollout
from tests.verl.trainers import NoJob, reward_workers

pytestmark = pytest.mark.integration  # it imports verl

REWARD = {"reward_score": 1.0, "reward_extra_info": {}}


class Answer:
    """The result of a call, for ``await``, and for `ray.get` of the fixture `workers`."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def get(self) -> Any:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def __await__(self) -> Any:
        yield from ()
        return self.get()


class Worker:
    """A worker that is unreachable for some calls of each method.

    Args:
        **unreachable: method -> how many of its calls fail.
    """

    def __init__(self, **unreachable: int) -> None:
        self._unreachable = unreachable
        self.calls: deque[str] = deque(maxlen=100)
        self.compute_score = self._method("compute_score", REWARD)
        self.needs_group = self._method("needs_group", False)
        self.__ray_ready__ = self._method("ready", True)

    def _method(self, name: str, result: Any) -> Any:
        def remote(*_: Any) -> Answer:
            self.calls.append(name)
            self._unreachable[name] = left = self._unreachable.get(name, 0) - 1
            return Answer(result if left < 0 else ActorUnavailableError("connection refused", None))

        return SimpleNamespace(remote=remote)


def options(**changed: Any) -> RewardLoopConfig:
    return RewardLoopConfig(on_failed="default", default_score=0.0, **changed)


def client(options: RewardLoopConfig, *workers: Worker) -> RewardClient:
    return RewardClient(workers, options, NoJob().handle)


async def test_a_sample_waits_until_its_worker_is_reachable() -> None:
    worker = Worker(compute_score=1, ready=3)
    assert await client(options(), worker).remote(None) == REWARD
    assert list(worker.calls) == ["compute_score", *["ready"] * 4, "compute_score"]


async def test_a_sample_whose_worker_dies_repeatedly_has_failed() -> None:
    job, worker = NoJob(), Worker(compute_score=99)
    reward = await RewardClient([worker], options(), job.handle).remote(None)
    assert reward["reward_extra_info"]["reward_outcome"] == "failed"
    assert job.failures == ["a reward worker died"]
    assert worker.calls.count("compute_score") == MAX_TASK_RETRIES + 1


@pytest.mark.parametrize("restarts", [True, False], ids=["unreachable", "never restarted"])
async def test_a_sample_whose_worker_does_not_come_back_has_failed_and_its_permits_are_free(
    monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    job, worker = NoJob(), Worker(compute_score=99, ready=10**9)
    if not restarts:
        monkeypatch.setattr(worker, "__ray_ready__", SimpleNamespace(remote=asyncio.get_running_loop().create_future))
    reward = await RewardClient([Worker(), worker], options(worker_answer_timeout_s=0.1), job.handle).remote(None)
    assert reward == REWARD
    client = RewardClient([worker], options(worker_answer_timeout_s=0.1), job.handle)
    reward = await client.remote(None)
    assert "reward_loop.worker_answer_timeout_s" in reward["reward_extra_info"]["reward_error"]
    assert worker.calls.count("compute_score") <= 1
    assert job.lost == ["reward worker 0"]


async def test_an_error_of_a_worker_that_cannot_reach_the_job_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    job, worker = NoJob(), Worker()
    error = RayTaskError("compute_score", "", LimitError("the limits of the job are lost")).as_instanceof_cause()
    monkeypatch.setattr(worker, "compute_score", SimpleNamespace(remote=lambda *_: Answer(error)))
    with pytest.raises(LimitError):
        await RewardClient([worker], options(), job.handle).remote(None)
    assert job.why == "LimitError: the limits of the job are lost"


async def test_the_job_records_that_the_run_must_stop() -> None:
    job, lost = NoJob(), Worker(compute_score=99, ready=10**9)
    client = RewardClient([lost], RewardLoopConfig(on_failed="raise", worker_answer_timeout_s=0.1), job.handle)
    with pytest.raises(RewardFunctionError, match="did not restart"):
        await client.remote(None)
    assert "RewardFunctionError: " in str(job.why)


def workers(monkeypatch: pytest.MonkeyPatch, *handles: Worker, **changed: Any) -> RewardWorkers:
    def get(answers: Any, timeout: float | None = None) -> Any:
        return [answer.get() for answer in answers] if isinstance(answers, list) else answers.get()

    monkeypatch.setattr(ray, "get", get)
    return reward_workers(monkeypatch, options(**changed), *handles)


def test_the_samples_of_a_batch_wait_until_their_worker_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, lost = Worker(), Worker(compute_score=3, ready=5)
    group = workers(monkeypatch, alive, lost)
    assert group.score_batch([None] * 4) == [REWARD] * 4
    assert (alive.calls.count("compute_score"), lost.calls.count("compute_score")) == (2, 5)


def test_a_batch_says_how_large_its_groups_are(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    group = workers(monkeypatch, worker := Worker())
    worker.compute_score = SimpleNamespace(remote=lambda data: (sent.append(data), Answer(REWARD))[1])
    group.client.by_group = True
    group.score_batch([rollout("1", uid=uid) for uid in "aab"])
    assert [data.non_tensor_batch["group_size"].tolist() for data in sent] == [[2], [2], [1]]


def test_the_start_waits_until_all_workers_are_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    group = workers(monkeypatch, Worker(), lost := Worker(needs_group=5))
    group.wait_until_ready()
    assert lost.calls.count("needs_group") == 6


def test_the_start_fails_if_a_worker_stays_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    group = workers(monkeypatch, Worker(needs_group=10**9), worker_start_timeout_s=0.1)
    with pytest.raises(RewardLoopError, match=r"0\.1 s.*reward_loop\.worker_start_timeout_s"):
        group.wait_until_ready()
