"""verl's agent loop worker and trainer with a queue before the judges, without Ray."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from reward_loop.agent import QueueCounts
from reward_loop.managers.groups import CALLER
from reward_loop.verl.options import REWARD_QUEUE
from reward_loop.verl.trainer.separate_async import QueueAgentLoopWorker, QueueSeparateAsyncTrainer, _version
from tests.support.clock import settle
from tests.verl.configs import ROLLOUT_ELSEWHERE, settled

pytestmark = pytest.mark.integration  # it imports verl

VERL = AgentLoopWorkerTQ.__ray_actor_class__


def output(score: float | None = None, **extra: Any) -> SimpleNamespace:
    return SimpleNamespace(reward_score=score, extra_fields=extra)


SEPARATE = ("trainer.v1.trainer_mode=separate_async", *ROLLOUT_ELSEWHERE)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker whose prompts have two rollouts that are generated at once, and whose judges wait for an event.

    `joins` is whether the judges wait for the group.
    """

    def init(self: Any, config: Any, handles: list[Any]) -> None:
        self.config, self.reward_loop_worker_handles = config, handles

    async def run_prompt(self: Any, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool) -> None:
        uid = prompt["uid"]
        calls = []
        for number in range(2):
            session: Any = SimpleNamespace(name=f"{uid}_{number}", times={}, is_submitted=False)
            arguments = {"uid": uid, "global_steps": 4, "session_id": number}
            calls.append(self._judge(session, [output(min_global_steps=3)], arguments))
        await asyncio.gather(*calls)

    async def compute_score(self: Any, outputs: list[Any], kwargs: dict) -> None:
        self.judging.append(kwargs)
        if self.joins:
            CALLER.get().release()
        await self.judged.wait()

    monkeypatch.setattr(VERL, "__init__", init)
    monkeypatch.setattr(VERL, "_run_prompt", run_prompt)
    monkeypatch.setattr(VERL, "_compute_score", compute_score)
    config = settled(
        *SEPARATE,
        "trainer.v1.separate_async.parameter_sync_step=3",
        "trainer.v1.sampler.max_off_policy_strategy=wait",
        "trainer.v1.sampler.max_off_policy_threshold=2",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        f"{REWARD_QUEUE}.capacity=2",
        f"{REWARD_QUEUE}.in_flight=1",
    )
    client = SimpleNamespace(by_group=False)
    worker: Any = QueueAgentLoopWorker(config, [client])
    worker.judging, worker.judged, worker.joins = [], asyncio.Event(), False
    return worker


def prompt(worker: Any, uid: str, *, validate: bool = False) -> asyncio.Task[None]:
    return asyncio.create_task(worker._run_prompt({"uid": uid}, {}, trajectory={"validate": validate}))


async def test_a_rollout_that_waits_for_others_of_its_prompt_leaves_its_place_to_them(worker: Any) -> None:
    worker.joins = True
    waiting = prompt(worker, "a")
    await settle()
    assert [call["session_id"] for call in worker.judging] == [0, 1]
    counts = await worker.queue_counts()
    assert (counts.queued, counts.judged, len(counts.compute_s)) == (Counter(), Counter(), 2)
    worker.judged.set()
    await waiting


async def test_a_prompt_waits_for_room_and_validation_goes_past_the_queue(worker: Any) -> None:
    waiting = [prompt(worker, uid) for uid in "ab"]
    await settle()
    assert [(call["uid"], call["session_id"]) for call in worker.judging] == [("a", 0)]
    assert (await worker.queue_counts()).queued == Counter([3]), "b has not begun"
    validation = prompt(worker, "v", validate=True)
    await settle()
    assert [call["session_id"] for call in worker.judging if call["uid"] == "v"] == [0, 1]
    worker.judged.set()
    async with asyncio.timeout(30):
        await asyncio.gather(validation, *waiting)


def test_the_age_of_a_rollout_is_that_of_the_oldest_weights() -> None:
    assert _version([output(min_global_steps=5), output(min_global_steps=3), output()], {"global_steps": 9}) == 3
    assert _version([output(min_global_steps=None)], {"global_steps": 9}) == 8


def trainer(*overrides: str) -> Any:
    trainer: Any = QueueSeparateAsyncTrainer(settled(*SEPARATE, *overrides))
    return trainer


def test_the_metrics_are_those_of_all_workers_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def worker_with(answer: QueueCounts) -> Any:
        return SimpleNamespace(queue_counts=SimpleNamespace(remote=lambda: answer))

    monkeypatch.setattr(PPOTrainerSeparateAsync, "_compute_metrics", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: (refs[:2], refs[2:]))
    monkeypatch.setattr(ray, "get", list)
    running = trainer()
    running.config.trainer.v1.separate_async.parameter_sync_step, running.global_steps = 3, 4
    counts = [QueueCounts(8, queued=Counter([3])), QueueCounts(8, queued=Counter([2, 4])), QueueCounts(8)]
    running.agent_loop_manager = SimpleNamespace(agent_loop_workers=list(map(worker_with, counts)))
    metrics: dict[str, float] = {}
    running._compute_metrics(None, metrics, {}, 1, 0)
    assert (metrics["reward_queue/size"], metrics["reward_queue/capacity"]) == (3, 16)
    assert (metrics["reward_queue/staleness_max"], metrics["reward_queue/staleness_mean"]) == (6, 3)
