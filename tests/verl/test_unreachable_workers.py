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
from reward_loop.managers.groups import CALLER, Caller
from reward_loop.verl.workers.reward_workers import MAX_TASK_RETRIES, RewardClient, RewardWorkers
from tests.support.clock import settle
from tests.verl.rollouts import rollout
from tests.verl.trainers import NoJob, reward_workers

pytestmark = pytest.mark.integration  # it imports verl

REWARD = {"reward_score": 1.0, "reward_extra_info": {}}
DIED = ActorUnavailableError("connection refused", None)


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
            return Answer(result if left < 0 else DIED)

        return SimpleNamespace(remote=remote)


def options(**changed: Any) -> RewardLoopConfig:
    return RewardLoopConfig(on_failed="default", default_score=0.0, **changed)


async def test_a_sample_waits_until_its_worker_is_reachable() -> None:
    worker = Worker(compute_score=1, ready=3)
    assert await RewardClient([worker], options(), NoJob().handle).remote(None) == REWARD
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


@pytest.mark.parametrize(
    ("outcome", "again"), [("unscored", True), ("failed", True), ("scored", False), (None, False)], ids=str
)
async def test_a_group_whose_worker_dies_is_scored_again_without_the_samples_that_have_left_it(
    outcome: str | None, again: bool
) -> None:
    """Once a score has arrived, the group was compared, and the others cannot be."""
    first = {"reward_score": 0.0, "reward_extra_info": {"reward_outcome": outcome} if outcome else {}}
    grouped = Grouped(first, DIED, REWARD)
    with grouped.client.prompt("q", 2):
        assert await grouped.score(0) == first
        reward = await grouped.score(1)
    assert (reward == REWARD) == again
    assert [lost for _, lost in grouped.sent[1:]] == ([{"q_0"}, {"q_0"}] if again else [frozenset()])


class Grouped:
    """A client whose groups are scored in one worker, with the given answers to the samples' calls, in order."""

    def __init__(self, *answers: Any) -> None:
        self.worker, left = Worker(), iter(answers)
        self.sent: list[tuple[str, frozenset[str]]] = []
        """The name of each sample that was sent, and the names of those that it does not wait for."""
        self.lost: list[tuple[Any, ...]] = []
        """The reports to the worker."""

        def compute_score(data: Any, lost: frozenset[str]) -> Any:
            self.sent.append((f"q_{data.non_tensor_batch['session_id'][0]}", lost))
            answer = next(left)
            if isinstance(answer, TypeError):
                raise answer
            return answer if isinstance(answer, asyncio.Future) else Answer(answer)

        self.worker.compute_score = SimpleNamespace(remote=compute_score)
        self.worker.lose = SimpleNamespace(remote=lambda *report: self.lost.append(report))  # type: ignore[attr-defined]
        self.client = RewardClient([self.worker], options(), NoJob().handle)
        self.client.by_group = True

    async def score(self, session: int) -> Any:
        return await self.client.remote(rollout("1", uid="q", session_id=session))


async def test_others_do_not_wait_for_a_sample_that_kills_its_worker() -> None:
    grouped = Grouped(*[DIED] * (MAX_TASK_RETRIES + 2), REWARD)
    with grouped.client.prompt("q", 2):
        killer = await grouped.score(0)
        assert killer["reward_extra_info"]["reward_outcome"] == "failed"
        assert grouped.lost == [("q", 2, ["q_0"])]  # for those that are in a worker now
        assert await grouped.score(1) == REWARD
    assert grouped.sent[-2:] == [("q_1", frozenset({"q_0"}))] * 2


async def test_others_do_not_wait_for_a_sample_that_ends_before_it_is_sent_to_a_worker_that_has_restarted() -> None:
    grouped = Grouped(TypeError("cannot pickle '_thread.lock' object"), DIED)
    restarts = asyncio.get_running_loop().create_future()
    grouped.worker.__ray_ready__ = SimpleNamespace(remote=lambda: restarts)
    with grouped.client.prompt("q", 3):
        with pytest.raises(TypeError):
            await grouped.score(0)
        scoring = asyncio.create_task(grouped.score(1))
        await settle()
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        assert grouped.lost == [("q", 3, ["q_0"]), ("q", 3, ["q_1"])]
        # Nor for one that raised in a worker: a restarted one has not seen it leave.
        error = RayTaskError("compute_score", "", ValueError("bug")).as_instanceof_cause()
        grouped.worker.compute_score = SimpleNamespace(remote=lambda *_: Answer(error))
        with pytest.raises(RayTaskError):
            await grouped.score(2)
        assert grouped.client._prompts["q"].lost == {"q_0", "q_1", "q_2"}
    assert len(grouped.lost) == 2


async def test_a_sample_is_not_sent_again_if_a_score_of_its_group_arrives_while_the_worker_restarts() -> None:
    """The group is closed: alone in another one, it would wait without end."""
    scored = asyncio.get_running_loop().create_future()
    restarts = asyncio.get_running_loop().create_future()
    grouped = Grouped(DIED, scored)
    grouped.worker.__ray_ready__ = SimpleNamespace(remote=lambda: restarts)
    with grouped.client.prompt("q", 2):
        first, second = (asyncio.create_task(grouped.score(session)) for session in range(2))
        await settle()
        scored.set_result(REWARD)
        assert await second == REWARD
        restarts.set_result(True)
        assert (await first)["reward_extra_info"]["reward_outcome"] == "failed"
    assert [name for name, _ in grouped.sent] == ["q_0", "q_1"]


async def test_a_reward_counts_that_arrived_before_its_worker_died() -> None:
    """The worker dies after its last answer, before the end of the call."""

    async def answers() -> Any:
        yield Answer(None)
        yield Answer(REWARD)
        raise DIED

    released: list[None] = []
    grouped = Grouped()
    grouped.worker.compute_score_in_group = SimpleNamespace(remote=lambda *_: answers())  # type: ignore[attr-defined]
    CALLER.set(Caller(release=lambda: released.append(None)))
    with grouped.client.prompt("q", 2):
        assert await grouped.score(0) == REWARD
    assert released == [None]


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


def test_a_batch_says_how_large_its_groups_are_and_which_samples_have_left_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []
    unscored = {"reward_score": 0.0, "reward_extra_info": {"reward_outcome": "unscored"}}
    answers = map(Answer, [unscored, DIED, REWARD, REWARD])
    group = workers(monkeypatch, worker := Worker())
    worker.compute_score = SimpleNamespace(remote=lambda *call: (sent.append(call), next(answers))[1])
    group.client.by_group = True
    rows = [rollout("1", uid=uid, session_id=session) for uid, session in (("a", 0), ("a", 1), ("b", 0))]
    assert group.score_batch(rows) == [unscored, REWARD, REWARD]
    assert [data.non_tensor_batch["group_size"].tolist() for data, _ in sent] == [[2], [2], [1], [2]]
    assert [lost for _, lost in sent] == [set(), {"a_0"}, set(), {"a_0"}]


def test_the_start_waits_until_all_workers_are_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    group = workers(monkeypatch, Worker(), lost := Worker(needs_group=5))
    group.wait_until_ready()
    assert lost.calls.count("needs_group") == 6


def test_the_start_fails_if_a_worker_stays_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    group = workers(monkeypatch, Worker(needs_group=10**9), worker_start_timeout_s=0.1)
    with pytest.raises(RewardLoopError, match=r"0\.1 s.*reward_loop\.worker_start_timeout_s"):
        group.wait_until_ready()
