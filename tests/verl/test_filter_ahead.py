"""Prompts begun ahead of the filter: which groups a step trains on, their age, and when the engine is idle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from reward_loop.errors import RewardLoopError
from reward_loop.verl import tq_rows
from reward_loop.verl.trainer.pipeline import RewardPipelineTrainer
from reward_loop.verl.trainer.replay_buffer import Evicted
from tests.verl.configs import pipeline
from tests.verl.trainers import NoJob

pytestmark = pytest.mark.integration  # imports verl

SIZE = 16
STEPS = 12


@dataclass
class Prompt:
    step: int
    """The step in which it was submitted."""
    filtered: bool
    generated: bool = False
    judged: bool = False


class Rollout:
    """The replay buffer, the rollout and the judges. Each poll generates all that was submitted, or judges some."""

    def __init__(self, seed: int, judged_at_a_poll: int) -> None:
        self.prompts: dict[str, Prompt] = {}
        self.partitions: Any = {"train": {}}
        self.fails: set[str] = set()
        """The prompts of which every rollout fails."""
        self.rounds = 0
        """How many times the engine generated."""
        self._random = Random(seed)
        self._judged_at_a_poll = judged_at_a_poll

    def unfinished(self) -> set[str]:
        return {uid for uid, prompt in self.prompts.items() if not prompt.judged}

    def generating(self) -> set[str]:
        return {uid for uid, prompt in self.prompts.items() if not prompt.generated}

    def wait(self, arrived: Callable[[], bool]) -> None:
        for _ in range(10_000):
            if arrived():
                return
            self.poll()
        raise AssertionError("the trainer waited indefinitely")

    def poll(self) -> None:
        if new := self.generating():
            self.rounds += 1
            for uid in new:
                self.prompts[uid].generated = True
                self.prompts[uid].judged = uid in self.fails
        self.judge(self._judged_at_a_poll)

    def judge(self, count: int) -> None:
        pending = [uid for uid, prompt in self.prompts.items() if prompt.generated and not prompt.judged]
        for uid in self._random.sample(pending[: 2 * count], min(count, len(pending))):
            self.prompts[uid].judged = True

    def evict(self, step: int, metrics: dict) -> Evicted:
        judged = {uid: prompt for uid, prompt in self.prompts.items() if prompt.judged}
        filtered = {uid for uid, prompt in judged.items() if prompt.filtered}
        too_old = {uid for uid, prompt in judged.items() if prompt.step < step - 1} - filtered
        gone = filtered | too_old | (judged.keys() & self.fails)
        self.drop(gone)
        metrics["evicted"] = metrics.get("evicted", 0) + len(too_old)
        return Evicted(gone, len(filtered))

    def drop(self, uids: set[str]) -> None:
        for uid in uids:
            del self.prompts[uid]


class Trainer(RewardPipelineTrainer):
    """Trains on the groups of a `Rollout`, some of which are filtered."""

    def __init__(self, filtered: Callable[[int], float], *, off_policy: bool, judged_at_a_poll: int, **options: Any):
        batch = (f"data.train_batch_size={SIZE}", f"actor_rollout_ref.actor.ppo_mini_batch_size={SIZE}")
        filters = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc")
        options |= {"one_step_off_policy": off_policy, "mini_batch_pipeline": False}
        super().__init__(pipeline(*batch, *filters, f"trainer.total_epochs={STEPS}", **options))
        self._job: Any = NoJob()
        self.global_steps, self.total_training_steps, self.steps_per_epoch = 1, STEPS, 1
        self.reward_loop_manager: Any = SimpleNamespace(reward_loop_worker_handles=[])
        self.replay_buffer: Any = Rollout(seed=0, judged_at_a_poll=judged_at_a_poll)
        self.filtered, self.trained, self.ages = filtered, [], []
        self.rounds: list[int] = []
        self.left: list[int] = []
        self.dropped = 0
        self._random, self._numbers = Random(1), 0

    def _submit(self, count: int, step: int) -> None:
        for _ in range(count):
            self._numbers += 1
            uid = f"p{self._numbers}"
            filtered = self._random.random() < self.filtered(self.global_steps)
            self.replay_buffer.prompts[uid] = Prompt(self.global_steps, filtered)
            self._submitted.append(uid)

    def _trajectories(self, uids: list[str]) -> KVBatchMeta:
        assert not any(self.replay_buffer.prompts[uid].filtered for uid in uids)
        assert len(uids) == SIZE
        self.ages += [self.global_steps - self.replay_buffer.prompts[uid].step for uid in uids]
        self.trained += uids
        return KVBatchMeta(keys=[f"{uid}_0_0" for uid in uids], tags=[{} for _ in uids])

    def _prepare(self, *args: Any) -> None:
        pass

    def _train(self, batch: Any, count: Any, timing_raw: dict) -> None:
        self.replay_buffer.judge(SIZE)  # others are judged meanwhile

    def _finish_step(self, batch: Any, metrics: dict) -> KVBatchMeta:
        self.replay_buffer.drop(set(batch.uids))
        self._forecast.end_step()
        self.left.append(len(self._submitted))
        self.dropped += metrics.get("evicted", 0)
        return batch.whole

    def on_sample_begin(self) -> None:
        pass

    def on_sample_end(self) -> None:
        assert not self.replay_buffer.generating(), "the engine sleeps only when all is generated"

    def run(self) -> Trainer:
        for step in range(1, STEPS + 1):
            self.global_steps = step
            before = self.replay_buffer.rounds
            self.step({}, {})
            self.rounds.append(self.replay_buffer.rounds - before)
        return self


@pytest.fixture(autouse=True)
def _without_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PPOTrainerSync, "_balance_batch", lambda self, batch, metrics, *_: batch)
    monkeypatch.setattr(tq_rows, "read_tags", lambda: ({}, {}))
    monkeypatch.setattr(tq_rows.tq, "kv_clear", lambda **_: None)


def half(step: int) -> float:
    return 0.5


def falls(step: int) -> float:
    """The filter suddenly keeps all groups."""
    return 0.9 if step < STEPS // 2 else 0.0


@pytest.mark.parametrize("max_ahead", [0.0, 2.0, 10.0])
@pytest.mark.parametrize("judged_at_a_poll", [1, SIZE])
@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("filtered", [half, falls, lambda step: 0.0])
def test_each_group_is_trained_on_once_in_order_and_at_most_one_step_late(
    filtered: Any, off_policy: bool, judged_at_a_poll: int, max_ahead: float
) -> None:
    run = Trainer(filtered, off_policy=off_policy, judged_at_a_poll=judged_at_a_poll, max_ahead=max_ahead).run()
    assert len(set(run.trained)) == len(run.trained) == STEPS * SIZE
    assert run.trained == sorted(run.trained, key=lambda uid: int(uid[1:])), "the oldest first"
    assert max(run.ages) <= 1
    # Submitted is what was trained on, filtered or dropped as too old, and what is left.
    assert not set(run.trained) & set(run._submitted)
    assert set(run._submitted) == run.replay_buffer.prompts.keys()


@pytest.mark.parametrize("off_policy", [False, True])
def test_with_a_steady_filter_a_step_generates_once_and_drops_hardly_anything(off_policy: bool) -> None:
    run = Trainer(half, off_policy=off_policy, judged_at_a_poll=SIZE).run()
    later = run.rounds[3:]
    assert sum(later) <= len(later) + 1
    assert run.dropped <= 0.02 * STEPS * SIZE
    replaced = Trainer(half, off_policy=False, judged_at_a_poll=SIZE, max_ahead=0).run().rounds[3:]
    assert sum(replaced) > 2 * len(replaced)


def test_what_a_step_does_not_need_belongs_to_the_next_step() -> None:
    run = Trainer(half, off_policy=False, judged_at_a_poll=SIZE).run()
    assert max(run.left) > 0
    assert 0 < sum(run.ages) < len(run.ages) / 2, "most rollouts are on-policy"
    assert not any(Trainer(half, off_policy=False, judged_at_a_poll=SIZE, max_ahead=0).run().ages)


def test_groups_that_a_suddenly_generous_filter_keeps_are_dropped_before_they_are_two_steps_old() -> None:
    run = Trainer(falls, off_policy=True, judged_at_a_poll=SIZE, max_ahead=10).run()
    assert run.dropped > 0
    assert max(run.ages) == 1


def test_a_group_that_failed_last_is_replaced() -> None:
    trainer = Trainer(lambda step: 0.0, off_policy=False, judged_at_a_poll=0)
    trainer._filters, trainer.replay_buffer.fails = False, {"p2"}
    trainer._generate(0, {}, {})
    batch = trainer._finish_generation({}, {})
    assert batch.uids == ["p1", *(f"p{number}" for number in range(3, SIZE + 2))]
    assert trainer.replay_buffer.unfinished() == set(batch.uids), "they wait for their rewards"


def test_no_more_batches_are_generated_for_a_step_than_allowed() -> None:
    shares = chain(repeat(1.0, 20 * SIZE), repeat(0.0))  # in the end, the filter keeps all groups
    trainer = Trainer(lambda step: next(shares), off_policy=False, judged_at_a_poll=SIZE, max_ahead=0)
    trainer.config.algorithm.filter_groups.max_num_gen_batches = 3
    with pytest.raises(RewardLoopError, match=r"filtered out 48 groups in step 1.*same acc.*max_num_gen_batches=3"):
        trainer.step({}, {})
    assert trainer._numbers == 3 * SIZE
