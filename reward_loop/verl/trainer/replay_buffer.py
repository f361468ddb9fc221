"""verl's replay buffer with a bounded wait, a polling interval, and a filter of groups that ignores masked samples.

verl waits indefinitely for rollouts and their rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, time
from typing import Any, NamedTuple

from typing_extensions import override
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, _accumulate_eviction_metrics

from reward_loop._util.text import listing
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.types import Outcome, finite_number
from reward_loop.verl.installed import replaced
from reward_loop.verl.options import SamplerOptions
from reward_loop.verl.samples import GENERATED, JUDGED, session_of, uid_of
from reward_loop.verl.tq_rows import KVBatchMeta, read_rewards

REWARD_METRIC = "reward"
"""The value of ``algorithm.filter_groups.metric`` that stands for the reward, and not for a key of the extra info."""

NAMED = 5
"""The largest number of prompts, and of rollouts, that an error message names."""


class Evicted(NamedTuple):
    """The groups that were evicted at one time."""

    uids: set[str]
    filtered: int
    """How many of them were filtered."""


class RewardReplayBuffer(ReplayBuffer):
    """Overrides of verl's replay buffer. Mixed in before the class of a buffer by :func:`extend`.

    A wait fails after ``trainer.v1.sampler.stall_timeout_s`` in which no prompt started or ended, and no rollout or
    reward arrived.

    Args:
        buffer: the buffer whose attributes the new one copies.
        sampler: how the trainer waits.
    """

    poll_interval: float

    def __init__(self, buffer: ReplayBuffer, sampler: SamplerOptions) -> None:
        # Not `super().__init__`: verl has created the buffer, by a constructor that may be the user's.
        self.__dict__.update(vars(buffer))
        self.checks: list[Callable[[], None]] = []
        """Functions that are called at every poll. An exception from one of them ends the wait."""
        self.usable: Callable[[KVBatchMeta], KVBatchMeta] = lambda batch: batch
        """Returns the rows of a sampled batch that are trained on, or that a validation shows and averages."""
        self._poll_interval_s, self._stall_timeout_s = sampler.poll_interval_s, sampler.stall_timeout_s
        self._state: Any = None
        self._quiet = 0.0
        """Seconds of waiting since the last change. Other work of the trainer does not count."""

    @override
    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        return self.usable(batch), metrics

    @override
    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        for check in self.checks:
            check()
        waiting = self.pending_keys[partition_id] | self.running_keys[partition_id]
        rows = self.partitions[partition_id]
        state = (partition_id, waiting, len(rows), sum(JUDGED in tag for tag in rows.values()))
        if state != self._state:
            self._state, self._quiet = state, 0.0
        if self._stall_timeout_s is not None and self._quiet > self._stall_timeout_s:
            raise RewardLoopError(self._stalled(partition_id, sorted(waiting)))
        began = monotonic()
        # Only during the wait: the mode `separate_async` compares `poll_interval` with the time of a wait to decide
        # whether the trainer was idle.
        with replaced(self, "poll_interval", self._poll_interval_s):
            logged = super()._wait_for_next_poll(partition_id, last_debug_time)
        self._quiet += monotonic() - began
        return logged

    def unfinished(self) -> set[str]:
        """Read the tags in TransferQueue. Returns the training prompts that lack a rollout or a reward."""
        self._sync_metadata_from_transfer_queue()
        return self.pending_keys["train"] | self.running_keys["train"]

    def generating(self) -> set[str]:
        """Read the tags in TransferQueue. Returns the training prompts that lack a rollout."""
        unfinished = self.unfinished()
        rows = self.partitions["train"]
        return unfinished - {uid_of(key) for key, tag in rows.items() if tag.get(GENERATED)}

    def wait(self, arrived: Callable[[], bool]) -> None:
        """Poll until ``arrived``, which reads the tags, returns true.

        Raises:
            RewardLoopError: nothing happened for ``stall_timeout_s`` seconds; the message names what is missing.
        """
        logged = time()
        while not arrived():
            logged = self._wait_for_next_poll("train", logged)

    def evict(self, step: int, metrics: dict) -> Evicted:
        """Evict the finished training groups that are filtered, failed without a trajectory, or are too old.

        A group is too old if its prompt was submitted before the step that precedes ``step``. Adds verl's metrics of
        evictions.
        """
        self._sync_metadata_from_transfer_queue()
        _, filtered, failed, counts = self._terminal_eviction_reasons(step, "train")
        submitted = self.prompt_global_steps["train"]
        too_old = {uid for uid in self.finished_keys["train"] - filtered if submitted[uid] < step - 1}
        uids, _, _, eviction_metrics = self._evict_terminal_groups(step, "train", (too_old, filtered, failed, counts))
        _accumulate_eviction_metrics(metrics, eviction_metrics, len(too_old))
        return Evicted(uids, len(filtered))

    @override
    def _dapo_filtered_keys(self, partition_id: str) -> Any:
        if partition_id != "val" and self.filter_groups_metric is not None:
            self._classify_groups(partition_id, self.filter_groups_metric)
        return super()._dapo_filtered_keys(partition_id)

    def _classify_groups(self, partition_id: str, metric: str) -> None:
        """Decide which finished groups are filtered out.

        A group is filtered out if two or more of its samples are scored, and all of these have the same value of the
        metric. Others count neither with the reward 0 or the default score, as they would in verl, nor do they need
        the metric.
        """
        # verl takes groups in its cache as examined, and examines only those that are left.
        decided = self._dapo_classification_cache[partition_id]
        new = self.finished_keys[partition_id] - decided.keys()
        partition = self.partitions[partition_id]
        keys = [key for key in partition if uid_of(key) in new]
        if not keys:
            return
        batch = KVBatchMeta(partition_id=partition_id, keys=keys, tags=[partition[key] for key in keys])
        values: dict[str, dict[str, float]] = {uid_of(key): {} for key in keys}
        undecided = set()
        for key, reward in read_rewards(batch).items():
            uid, (session, _) = uid_of(key), session_of(key)
            value = finite_number(reward.reward if metric == REWARD_METRIC else reward.info.get(metric))
            if reward.result.outcome is not Outcome.SCORED:
                continue
            if value is not None:
                # By session, whose outputs all have the same reward: it counts once.
                values[uid][session] = value
            else:  # verl decides, and stops the run for what is missing or no number
                undecided.add(uid)
        for uid in values.keys() - undecided:
            scores = list(values[uid].values())
            # verl compares the standard deviation with 0, which it misses for 0.1, 0.1, 0.1 by a rounding error.
            alike = len(scores) > 1 and min(scores) == max(scores)
            decided[uid] = scores[0] if alike else None

    def _stalled(self, partition_id: str, prompts: list[str]) -> str:
        what = "validation" if partition_id == "val" else "training"
        rows = [key for key, tag in self.partitions[partition_id].items() if JUDGED not in tag]
        return (
            f"nothing happened for {self._quiet:.0f} s while {what} waited for {len(prompts)} prompts "
            f"(trainer.v1.sampler.stall_timeout_s={self._stall_timeout_s:g}). reward_loop.watchdog_s logs "
            f"the samples that are being scored. The first prompts: {listing(prompts[:NAMED])}; "
            f"generated, without a reward: {listing(rows[:NAMED])}"
        )


def extend(buffer: Any, sampler: SamplerOptions) -> RewardReplayBuffer:
    """Return a copy of a replay buffer of verl, or of the user's subclass, with the overrides of `RewardReplayBuffer`.

    Raises:
        ConfigError: the class of ``trainer.v1.sampler.custom_sampler`` is not a subclass of verl's ReplayBuffer.
    """
    cls = type(buffer)
    if not issubclass(cls, ReplayBuffer):
        raise ConfigError(
            f"trainer.v1.sampler.custom_sampler.name={cls.__name__}: the class must inherit from "
            "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer or ReplayBufferAsync"
        )
    return type(f"Reward{cls.__name__}", (RewardReplayBuffer, cls), {})(buffer, sampler)
