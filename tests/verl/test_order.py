"""The order of a step in the mode ``reward_pipeline``, with all that verl does in it left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from reward_loop.errors import RewardLoopError
from reward_loop.verl import tq_rows
from reward_loop.verl.tq_rows import select
from reward_loop.verl.trainer.pipeline import RewardPipelineTrainer, StepBatch
from reward_loop.verl.trainer.reward_loop_trainer import NothingToLearnError
from reward_loop.verl.trainer.reward_metrics import StepRewards
from tests.verl.configs import pipeline

pytestmark = pytest.mark.integration  # imports verl

ROWS = 8
"""Rows of a mini-batch: two groups of four."""


@pytest.fixture(autouse=True)
def _without_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PPOTrainerSync, "_balance_batch", lambda self, batch, metrics, *_: batch)


class Judges:
    """Stands where the replay buffer is. Groups end one after the other, and only while the trainer waits."""

    def __init__(self, order: str) -> None:
        self.partitions: Any = {"train": {}}
        self.order = list(order)
        self.pending: set[str] = set()

    def unfinished(self) -> set[str]:
        return self.pending

    def submit(self, uids: Iterable[str]) -> None:
        self.pending |= set(uids)

    def wait(self, arrived: Callable[[], bool]) -> None:
        while not arrived() and self.order:
            self.pending.discard(self.order.pop(0))
        if not arrived():
            raise RewardLoopError(f"the trainer waited for {sorted(self.pending)}")


class Trainer(RewardPipelineTrainer):
    """Records what it would do. `sizes` gives the rows of each group; the groups in `fully_masked` have no score."""

    def __init__(
        self, by_mini_batch: bool, sizes: dict[str, int], arrival: str, fully_masked: str = "", *, ahead: bool = False
    ) -> None:
        batch = (f"data.train_batch_size={len(sizes)}", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
        super().__init__(
            pipeline(*batch, "trainer.total_epochs=1", mini_batch_pipeline=by_mini_batch, one_step_off_policy=ahead)
        )
        self.global_steps = self.total_training_steps = self.steps_per_epoch = 1
        self.sizes, self.fully_masked = sizes, fully_masked
        self.done: list[str] = []
        self.masked: list[str] = []
        self.replay_buffer: Any = Judges(arrival)

    def on_sample_begin(self) -> None:
        self.done.append("generate")

    def _submit(self, count: int, step: int) -> None:
        self.replay_buffer.submit(self.sizes)

    def _finish_generation(self, metrics: dict, timing_raw: dict) -> StepBatch:
        keys = [f"{uid}_{row}_0" for uid, size in self.sizes.items() for row in range(size)]
        groups = {uid: [i for i, key in enumerate(keys) if key.startswith(uid)] for uid in self.sizes}
        padding = list(range(len(keys), len(keys) + -len(keys) % ROWS))
        keys += [f"pad_{row}_0" for row in padding]
        whole = KVBatchMeta(keys=keys, tags=[{} for _ in keys])
        return StepBatch(list(self.sizes), whole, groups, padding)

    def _prepare(self, batch: StepBatch, metrics: dict, timing_raw: dict) -> None:
        self.done.append("prepare")

    def _learners(self, batch: KVBatchMeta) -> KVBatchMeta:
        there = [i for i, key in enumerate(batch.keys) if key[0] not in self.fully_masked]
        if not there:
            raise NothingToLearnError(f"nothing in {batch.keys}")
        return select(batch, there)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> None:
        uids = sorted({key.split("_")[0] for key in batch.keys})
        self.done.append(f"advantage of {''.join(uids)}")

    def _update(self, rows: KVBatchMeta, metrics: dict, timing_raw: dict) -> None:
        self.done.append(f"update on {len(rows.keys)} rows")

    def _finish_step(self, batch: StepBatch, metrics: dict) -> KVBatchMeta:
        assert not batch.groups
        assert not batch.rows
        if not batch.trained and batch.nothing is not None:
            raise batch.nothing
        return batch.whole

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        return ROWS

    def _data_parallel_size(self) -> int:
        return 1

    def _mask(self, keys: list[str]) -> None:
        self.masked += keys


EVEN = dict.fromkeys("abcd", 4)


@pytest.mark.parametrize(
    ("by_mini_batch", "sizes", "arrival", "order"),
    [
        # Without overlaps, all rewards are awaited first.
        (False, EVEN, "dcba", "advantage of abcd, update on 16 rows"),
        (True, EVEN, "cadb", "advantage of ac, update on 8 rows, advantage of bd, update on 8 rows"),
        # 3 + 4 rows are too few; with 6 + 2 more there are 15, and one of padding.
        (True, {"a": 3, "b": 4, "c": 6, "d": 2}, "badc",
         "advantage of ab, advantage of cd, update on 8 rows, update on 8 rows"),
    ],
)  # fmt: skip
def test_a_mini_batch_is_trained_on_when_its_groups_are_complete(
    by_mini_batch: bool, sizes: dict[str, int], arrival: str, order: str
) -> None:
    trainer = Trainer(by_mini_batch, sizes, arrival)
    trainer.step({}, {})
    assert trainer.done == ["generate", "prepare", *order.split(", ")]


def test_each_mini_batch_has_an_update_of_its_own() -> None:
    trainer = Trainer(True, EVEN, "")
    trainer.replay_buffer.submit = lambda uids: None  # all rewards arrive while the prompts are generated
    trainer.step({}, {})
    assert trainer.done == ["generate", "prepare", "advantage of abcd", *["update on 8 rows"] * 2]


class Rows(Trainer):
    """Takes down the rows of each update."""

    def _update(self, rows: KVBatchMeta, metrics: dict, timing_raw: dict) -> None:
        self.done.append(" ".join(key.removesuffix("_0") for key in rows.keys))

    @property
    def updates(self) -> list[str]:
        return [words for words in self.done if "_" in words]


@pytest.mark.parametrize(
    ("sizes", "learners"),
    [
        ({"a": 4, "b": 4, "c": 4}, [6, 6]),
        ({"a": 8, "b": 8, "c": 1}, [8, 5, 4]),
        ({"a": 8, "b": 5}, [7, 6]),
        (EVEN, [8, 8]),
    ],
)
def test_the_last_mini_batches_share_the_rows_that_are_left(sizes: dict[str, int], learners: list[int]) -> None:
    """One row alone would weigh eight times as much as the others."""
    trainer = Rows(True, sizes, "".join(sizes))
    trainer.step({}, {})
    names = [words.split() for words in trainer.updates]
    assert [sum(not name.startswith("pad") for name in update) for update in names] == learners
    assert [len(update) for update in names] == [ROWS] * len(learners)


@pytest.mark.parametrize(("versions", "oldest", "share"), [((1, 2, 2, 2), 1, 0.25), ((2, 2, 2, 2), 0, 0)])
def test_off_policy_steps_is_the_age_of_the_oldest_rollout(
    monkeypatch: pytest.MonkeyPatch, versions: tuple[int, ...], oldest: int, share: float
) -> None:
    monkeypatch.setattr(tq_rows.tq, "kv_clear", lambda **_: None)
    trainer = Trainer(True, EVEN, "abcd")
    trainer.config.trainer.critic_warmup = 9
    trainer.global_steps, trainer._judged, trainer._rewards, trainer._left_out = 3, [], StepRewards(), {}
    tags = [*({"min_global_steps": version} for version in versions), {"is_padding": True}]
    batch = StepBatch([], KVBatchMeta(keys=[f"{row}_0_0" for row in range(5)], tags=tags), {}, [], trained=[0, 1, 2, 3])
    metrics: dict[str, float] = {}
    RewardPipelineTrainer._finish_step(trainer, batch, metrics)
    assert metrics["reward_pipeline/off_policy_steps"] == oldest
    assert metrics["reward_pipeline/off_policy_share"] == share
    # verl deletes it from TransferQueue with the trained rows, after it has padded a mini-batch.
    assert trainer._left_out == {"4_0_0": {"is_padding": True}}


def test_one_step_ahead_generates_the_next_step_first_and_nothing_after_the_last_epoch() -> None:
    trainer = Trainer(False, EVEN, "abcd", ahead=True)
    trainer.total_training_steps, trainer.config.trainer.total_epochs = 9, 2
    trainer.step({}, {})
    ahead = ["generate", "prepare", "advantage of abcd", "update on 16 rows"]
    assert trainer.done == ["generate", *ahead]
    trainer.global_steps = 2
    trainer.step({}, {})
    assert trainer.done == ["generate", *ahead, *ahead[1:]]


def test_a_resumed_run_generates_only_what_the_checkpoint_lacks() -> None:
    trainer = Trainer(False, EVEN, "abcd", ahead=True)
    trainer._submitted = list("abcd")
    trainer.step({}, {})
    assert "generate" not in trainer.done


def test_groups_without_a_score_leave_the_batch_and_pad_the_last_mini_batch() -> None:
    trainer = Rows(True, {"a": 4, "b": 4, "c": 4, "d": 3}, "abcd", fully_masked="ab")
    trainer.step({}, {})
    assert trainer.updates == ["c_0 c_1 c_2 c_3 d_0 d_1 d_2 pad_15"]
    assert trainer.masked == ["pad_15_0"]
    # More padding than verl has added: rows without a score fill up.
    trainer = Rows(True, {"a": 4, "b": 2, "c": 1, "d": 1}, "abcd", fully_masked="a")
    trainer.step({}, {})
    assert sorted(trainer.updates[0].split()) == ["a_0", "a_1", "a_2", "a_3", "b_0", "b_1", "c_0", "d_0"]
    assert trainer.masked == [f"a_{row}_0" for row in range(4)]
    with pytest.raises(NothingToLearnError):
        Trainer(True, EVEN, "abcd", fully_masked="abcd").step({}, {})
