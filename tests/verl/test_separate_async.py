"""verl's agent loop worker and trainer with a queue before the judges, without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from reward_loop.verl.options import REWARD_QUEUE
from reward_loop.verl.separate_async import QueueAgentLoopWorker, QueueSeparateAsyncTrainer, _version
from tests.verl.configs import settled

pytestmark = pytest.mark.integration  # it imports verl

VERL = AgentLoopWorkerTQ.__ray_actor_class__


def output(score: float | None = None, **extra: Any) -> SimpleNamespace:
    return SimpleNamespace(reward_score=score, extra_fields=extra)


SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    return made_worker(monkeypatch)


def made_worker(monkeypatch: pytest.MonkeyPatch, *, by_group: bool = False) -> Any:
    """A worker whose prompts have two rollouts that are generated at once, and whose judges wait for an event.

    `steps` gives the next training step at the end of each rollout of a prompt, which then end in turn; `newer` is
    whether verl passes the argument `validate`. `outputs` has the rollouts of each prompt.
    """

    def init(self: Any, config: Any, handles: list[Any]) -> None:
        self.config, self.reward_loop_worker_handles = config, handles

    async def run_prompt(self: Any, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool) -> None:
        uid = prompt["uid"]
        self.outputs[uid] = [output(min_global_steps=3), output(min_global_steps=3)]
        calls = []
        for session, one in enumerate(self.outputs[uid]):
            arguments = {"uid": uid, "global_steps": 4, "session_id": session}
            options = {"validate": trajectory["validate"]} if self.newer else {}
            calls.append(self._judge({}, [one], arguments, **options))
        if uid not in self.steps:
            await asyncio.gather(*calls)
        for step, call in zip(self.steps.get(uid, ()), calls, strict=False):
            await self.start_step(step)
            await call

    async def compute_score(self: Any, outputs: list[Any], kwargs: dict, **options: Any) -> None:
        self.judging.append({**kwargs, **options})
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
    worker: Any = QueueAgentLoopWorker(config, [SimpleNamespace(by_group=by_group)])
    worker.judging, worker.judged, worker.outputs, worker.steps, worker.newer = [], asyncio.Event(), {}, {}, False
    return worker


async def turns(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def prompt(worker: Any, uid: str, *, validate: bool = False) -> asyncio.Task[None]:
    return asyncio.create_task(worker._run_prompt({"uid": uid}, {}, trajectory={"validate": validate}))


async def test_rollouts_are_judged_in_turn_and_prompts_begin_when_there_is_room(worker: Any) -> None:
    prompts = [prompt(worker, uid) for uid in "abc"]
    await turns()
    assert [(call["uid"], call["session_id"]) for call in worker.judging] == [("a", 0)]
    figures = await worker.queue_metrics(5)
    assert figures["reward_queue/size"] == 1
    # Two versions of the weights, with three updates to each.
    assert figures["reward_queue/staleness_max"] == figures["reward_queue/all_staleness_max"] == 6
    assert figures["reward_queue/waiting_producers"] == 2
    worker.judged.set()
    async with asyncio.timeout(30):
        await asyncio.gather(*prompts)
    assert [call["uid"] for call in worker.judging] == list("aabbcc")
    figures = await worker.queue_metrics(5)
    assert (figures["reward_queue/size"], figures["reward_queue/reserved"], figures["reward_queue/put"]) == (0, 0, 4)


async def test_validation_goes_past_the_queue(worker: Any) -> None:
    waiting = [prompt(worker, uid) for uid in "ab"]
    await turns()
    validation = prompt(worker, "v", validate=True)
    await turns()
    assert [call["session_id"] for call in worker.judging if call["uid"] == "v"] == [0, 1]
    worker.judged.set()
    async with asyncio.timeout(30):
        await asyncio.gather(validation, *waiting)


async def test_verl_may_pass_the_argument_validate(worker: Any) -> None:
    """A change to verl that is not released adds this argument, and requires it."""
    worker.newer = True
    worker.judged.set()
    await prompt(worker, "a")
    await prompt(worker, "v", validate=True)
    assert [(call["uid"], call["validate"]) for call in worker.judging] == [("a", False)] * 2 + [("v", True)] * 2


@pytest.mark.parametrize(
    ("strategy", "threshold", "next_step", "judged"),
    [
        ("drop", 2, 0, 2),
        ("drop", 2, 5, 2),  # a span of two steps, from 4 to 5
        ("drop", 2, 6, 0),
        ("drop", None, 6, 2),
        ("wait", 2, 6, 2),
    ],
)
async def test_rollouts_that_will_be_evicted_are_not_judged(
    worker: Any, strategy: str, threshold: int | None, next_step: int, judged: int
) -> None:
    worker.config.trainer.v1.sampler = {"max_off_policy_strategy": strategy, "max_off_policy_threshold": threshold}
    await worker.start_step(next_step)
    worker.judged.set()
    await prompt(worker, "a")
    assert len(worker.judging) == judged
    for one in worker.outputs["a"]:
        assert one.extra_fields.get("reward_extra_info", {}).get("reward_masked", False) is (judged == 0)
        assert one.reward_score == (None if judged else 0.0)


async def test_a_manager_of_groups_gets_all_rollouts_of_a_prompt_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = made_worker(monkeypatch, by_group=True)
    worker.config.trainer.v1.sampler = {"max_off_policy_strategy": "drop", "max_off_policy_threshold": 2}
    worker.steps = {"a": (5, 6), "b": (6, 6)}
    worker.judged.set()
    await prompt(worker, "a")
    await prompt(worker, "b")
    assert [(call["uid"], call["session_id"]) for call in worker.judging] == [("a", 0), ("a", 1)]


def test_the_workers_learn_which_step_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(PPOTrainerSeparateAsync, "on_step_end", lambda self: told.append(-1))
    running = trainer(by_group=False)
    running.global_steps = 4
    running.agent_loop_manager = SimpleNamespace(
        agent_loop_workers=[SimpleNamespace(start_step=SimpleNamespace(remote=told.append))] * 2
    )
    running.on_step_end()
    assert told == [-1, 5, 5]


def test_the_age_of_a_rollout_is_that_of_the_oldest_weights() -> None:
    assert _version([output(min_global_steps=5), output(min_global_steps=3), output()], {"global_steps": 9}) == 3
    assert _version([output(min_global_steps=None)], {"global_steps": 9}) == 8


def trainer(*overrides: str, by_group: bool) -> Any:
    trainer: Any = QueueSeparateAsyncTrainer(settled(*SEPARATE, *overrides))
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[SimpleNamespace(by_group=by_group)])
    return trainer


def test_the_metrics_of_a_dead_worker_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        def __init__(self, answer: Any) -> None:
            self.queue_metrics = SimpleNamespace(remote=lambda step: answer)

    def get(answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(PPOTrainerSeparateAsync, "_compute_metrics", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: (refs, []))
    monkeypatch.setattr(ray, "get", get)
    running = trainer(by_group=False)
    running.global_steps = 4
    running.agent_loop_manager = SimpleNamespace(
        agent_loop_workers=[Worker({"reward_queue/size": 2.0}), Worker(ActorDiedError())]
    )
    metrics: dict[str, float] = {}
    running._compute_metrics(None, metrics, {}, 1, 0)
    assert metrics == {"reward_queue/size": 2.0}
    running.agent_loop_manager = SimpleNamespace(agent_loop_workers=[Worker(ActorDiedError())])
    running._compute_metrics(None, metrics := {}, {}, 1, 0)
    assert metrics == {}
