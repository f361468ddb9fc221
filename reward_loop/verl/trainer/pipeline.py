"""The trainer mode ``reward_pipeline``: training overlaps with the computation of rewards.

*Mini-batch pipeline*: the trainer updates on the groups whose rewards have arrived, while the other groups are still
being judged. *One-step off-policy*: the rollout of step k+1 runs while the rewards of step k arrive; from the second
step on, each step trains on rollouts that are one step old. Each overlap works alone or together with the other.

Invariants:

- The rollout engine does not generate while the trainer computes. A step first waits until every submitted prompt,
  including the prompts of the next step, is generated; then the engine sleeps until the new weights are sent.
- A step trains on the ``train_batch_size`` oldest prompts of ``_submitted``; with ``algorithm.filter_groups``, on the
  oldest that have passed the filter. Prompts that are begun because the filter will probably remove others, and are not
  needed, stay in ``_submitted``: the next step submits fewer.
- A rollout is at most one step old. Groups that would be older are evicted: there are some only if the filter keeps
  more than two standard deviations more than in the last steps.
- Old and reference log-probabilities and values are computed for the whole batch, before the first update of the step.
- A group (all rollouts of one prompt) is never split: its advantages are computed in one call, when all its rewards
  have arrived.
- Each row with an advantage is passed to ``_update`` exactly once. The last mini-batches of a step are filled up with
  padding: rows whose masks are zero. As far as is known before, they share the last rows equally.
- With the mini-batch pipeline, each mini-batch has an update call. The learning-rate schedules count these calls, as
  they count the updates of verl's mode ``separate_async``.
- The tags in TransferQueue are the only state of rollouts and rewards. The trainer reads them while it waits.

States of a prompt:

========== ============================================= ============================ =============================
State      Begins with                                   In TransferQueue             Kept in
========== ============================================= ============================ =============================
generating ``_submit``, or a resumed checkpoint          status ``pending`` or        ``_submitted``
                                                         ``running``
generated  the last session has published its            a trajectory has the tag     ``_submitted``; from the end of
           trajectory, or has failed                     ``generated``                generation, ``StepBatch.groups``
complete   all sessions have ended, rewards included     status ``finished`` or       ``_submitted`` or
                                                         ``failure``                  ``StepBatch.groups``
trained    ``_train``: the rows have an advantage, or    the same                     ``StepBatch.rows``, until a
           can pad a mini-batch                                                       mini-batch is full; ``spare``
cleared    ``_finish_step``: the rows are deleted        nothing                      nowhere
evicted    ``_evict`` of a complete group: it was        nothing                      nowhere; new prompts replace it
           filtered, failed without a trajectory, or                                  if the step needs them
           would be two steps old
========== ============================================= ============================ =============================

A session is judged as soon as it is generated, so judging overlaps with the first three states. A reward model on the
trainer's GPUs is the exception: sessions end without rewards, and ``_finish_generation`` has the whole batch judged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from omegaconf import DictConfig, open_dict
from typing_extensions import override
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils.profiler import marked_timer, simple_timer
from verl.utils.tensordict_utils import assign_non_tensor

from reward_loop.agent.filter_forecast import FilterForecast
from reward_loop.errors import RewardLoopError
from reward_loop.records import Interval, Records, seconds_of
from reward_loop.verl.options import PIPELINE_MODE, by_mini_batch, mini_batch_groups, read_mode
from reward_loop.verl.run.job import RunningJob
from reward_loop.verl.samples import TRAINING_STEP, uid_of
from reward_loop.verl.tq_rows import KVBatchMeta, clear, copy, last_failure, read_tags, read_trajectories, select
from reward_loop.verl.trainer.replay_buffer import RewardReplayBuffer
from reward_loop.verl.trainer.reward_loop_trainer import NothingToLearnError
from reward_loop.verl.trainer.reward_metrics import StepRewards, overlap_metrics


@register_trainer(PIPELINE_MODE)
class RewardPipelineTrainer(PPOTrainerSync):
    """verl's synchronous, colocated trainer, with another order of the parts of a step: see `step`."""

    replay_buffer: RewardReplayBuffer
    # What `with_reward_loop` adds.
    _job: RunningJob
    _learners: Callable[[KVBatchMeta], KVBatchMeta]
    _mask: Callable[[list[str]], None]
    _judge_colocated: Callable[[KVBatchMeta], None]
    _rewards: StepRewards
    _left_out: dict[str, dict[str, Any]]
    _records: Records | None
    _is_first = True
    """Whether no step has run in this process."""

    def __init__(self, config: DictConfig) -> None:
        options = read_mode(config).pipeline
        assert options is not None, f"trainer.v1.trainer_mode must be {PIPELINE_MODE}"
        self.options = options
        with open_dict(config):
            # verl chooses the replay buffer and the data loader by this name: use those of the mode `sync`.
            config.trainer.v1.trainer_mode = "sync"
        super().__init__(config)
        config.trainer.v1.trainer_mode = PIPELINE_MODE  # the name that loggers record
        self._submitted: list[str] = []
        """The uids of the submitted prompts that are not in a batch yet, oldest first."""
        self._mini_batch_groups = mini_batch_groups(config, critic=self.use_critic)
        self._by_mini_batch = by_mini_batch(config, options)
        # verl's schedules of the learning rate run for this many updates a step.
        self.parameter_sync_step = 1
        if self._by_mini_batch:
            self.parameter_sync_step = math.ceil(config.data.train_batch_size / self._mini_batch_groups)
        self._filtered = 0
        """The number of groups that were filtered in the current step."""
        self._judged: list[Interval] = []
        """For each reward of the current step, when it was requested and when it arrived."""
        self._filters = self.replay_buffer.filter_groups_metric is not None
        self._forecast = FilterForecast(round(options.max_ahead * config.data.train_batch_size))
        self._kept: set[str] = set()
        """The prompts of ``_submitted`` that have passed the filter, as far as the forecast has counted them."""
        self._replaces = self._filters or self.replay_buffer.sync_refill_failed_groups

    @override
    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        if self.options.one_step_off_policy or (self._filters and self.options.max_ahead > 0):
            # With any other name than "sync", verl saves the prompts in flight in its checkpoints.
            self.trainer_mode = PIPELINE_MODE

    @override
    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        prompts, _ = read_tags()
        self._submitted = list(prompts)

    @override
    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        """Run the parts of one training step: generate, prepare, and train on each mini-batch that has its rewards.

        Without an overlap, prepare after all rewards have arrived, as verl's mode ``sync`` does.
        """
        self._judged, self._filtered = [], 0
        ahead = self.options.one_step_off_policy
        # One step ahead, the step before has submitted these prompts, or the checkpoint has them.
        if not ahead or (self._is_first and len(self._submitted) < self.config.data.train_batch_size):
            self._generate(0, metrics, timing_raw)
        self._is_first = False
        # verl also stops after the last epoch.
        if ahead and self.global_steps < min(
            self.total_training_steps, self.config.trainer.total_epochs * self.steps_per_epoch
        ):
            self._generate(1, metrics, timing_raw)
        batch = self._finish_generation(metrics, timing_raw)
        overlaps = ahead or self._by_mini_batch
        if overlaps:
            self._prepare(batch, metrics, timing_raw)

        def ready() -> int:
            unfinished = self.replay_buffer.unfinished()
            return batch.ready_mini_batches(unfinished, self.parameter_sync_step, self._mini_batch_groups)

        def more() -> bool:
            return ready() > trained

        trained = 0
        while trained < self.parameter_sync_step:
            if not more():
                with simple_timer("wait_reward", timing_raw):
                    self.replay_buffer.wait(more)
            if not overlaps:
                self._prepare(batch, metrics, timing_raw)
            before, trained = trained, ready()
            last = trained == self.parameter_sync_step
            self._train(batch, None if last else (trained - before) * self._mini_batch_groups, timing_raw)
        return self._finish_step(batch, metrics)

    def _generate(self, ahead: int, metrics: dict, timing_raw: dict) -> None:
        """Submit the prompts that this step lacks, or this step and the next one if ``ahead`` is 1."""
        with simple_timer("gen", timing_raw):
            self.on_sample_begin()
            later = ahead * self.config.data.train_batch_size
            missing = self._missing(self.replay_buffer.unfinished(), metrics, later=later)
            self._submit(missing, self.global_steps + ahead)

    def _submit(self, count: int, step: int) -> None:
        """Submit new prompts to the rollout, for a training step.

        If groups may be replaced, a prompt may be trained on in another step than the one that it was submitted for.
        """
        if not count:
            return
        batch = self._next_train_batch(count)
        if not self._replaces:
            assign_non_tensor(batch, **{TRAINING_STEP: [step] * len(batch)})
        self._submitted += list(batch["uid"])
        self._submit_batch_to_rollout(batch)

    def _missing(self, unfinished: set[str], metrics: dict, *, later: int = 0) -> int:
        """Evict groups, and return how many more prompts to begin.

        Args:
            unfinished: the prompts that lacked a rollout or a reward just before this call. So the filter has examined
                all others that are left.
            later: the number of groups that the next step needs, if its prompts are begun now.
        """
        filtered = self._evict(metrics)
        kept = set(self._submitted) - unfinished
        self._forecast.count(kept=len(kept - self._kept), filtered=filtered)
        self._kept = kept
        pending = len(self._submitted) - len(kept)
        size = self.config.data.train_batch_size
        return self._forecast.missing(size, kept=len(kept), pending=pending, later=later)

    def _finish_generation(self, metrics: dict, timing_raw: dict) -> StepBatch:
        """Wait until all submitted prompts are generated, put the rollout engine to sleep, and return the batch.

        With a filter, also wait until the groups of the step have passed it.
        """
        size = self.config.data.train_batch_size
        missing = 0
        while True:
            with simple_timer("gen", timing_raw):
                self._submit(missing, self.global_steps)
                self.replay_buffer.wait(lambda: not self.replay_buffer.generating())
            if not self._replaces:
                break
            with simple_timer("wait_reward", timing_raw):
                # The engine is awake until then, because it may have to generate replacements.
                missing = self._wait_for_filter(size, metrics)
            if not missing:
                break
        uids, self._submitted = self._submitted[:size], self._submitted[size:]
        with simple_timer("gen", timing_raw):
            self.on_sample_end()
        self._job.check()  # waits poll only while something is missing
        trajectories = self._trajectories(uids)
        if self.reward_loop_manager.reward_loop_worker_handles is None:
            # The reward model runs on the trainer's GPUs, so nothing overlaps with judging.
            began = time.time()
            with simple_timer("wait_reward", timing_raw):
                self._judge_colocated(trajectories)
            self._judged = [(began, began + timing_raw["wait_reward"])]
        # The rows without a reward are still among them: the rewards have not arrived.
        whole = copy(self._balance_batch(trajectories, metrics=metrics))
        # verl sets it in `_step_once`, which this mode does not call. The log-probabilities depend on it.
        whole.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        return StepBatch.of(uids, whole)

    def _wait_for_filter(self, size: int, metrics: dict) -> int:
        """Wait until the ``size`` oldest groups have passed the filter, or it has removed more than was expected.

        Returns how many more prompts must be generated. Without a filter, returns at once how many groups failed.
        """
        missing = 0

        def decided() -> bool:
            nonlocal missing
            unfinished = self.replay_buffer.unfinished()
            missing = self._missing(unfinished, metrics)
            return missing > 0 or not self._filters or unfinished.isdisjoint(self._submitted[:size])

        self.replay_buffer.wait(decided)
        return missing

    def _evict(self, metrics: dict) -> int:
        """Evict groups that are filtered, failed without a trajectory or are too old. Returns how many are filtered."""
        if not self._replaces:
            return 0
        evicted = self.replay_buffer.evict(self.global_steps, metrics)
        if evicted.uids:
            self._job.check()  # raises if the run must stop: the replacements would fail too
            self._submitted = [uid for uid in self._submitted if uid not in evicted.uids]
            self._filtered += evicted.filtered
            if self._filtered and len(self._submitted) < self.config.data.train_batch_size:
                self._check_filtered()
        return evicted.filtered

    def _check_filtered(self) -> None:
        """Raise if replacing the groups that are filtered in this step would exceed verl's bound."""
        options, size = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        most = options.get("max_num_gen_batches", 0)
        if most > 0 and size + self._filtered > most * size:
            raise RewardLoopError(
                f"algorithm.filter_groups has filtered out {self._filtered} groups in step {self.global_steps}, whose "
                f"rollouts have the same {options.metric}. To replace them, more batches of {size} would have to be "
                f"generated than algorithm.filter_groups.max_num_gen_batches={most} allows. Are the prompts too easy "
                "or too hard, or does the reward function give every sample the same score? 0 means no limit"
            )

    def _prepare(self, batch: StepBatch, metrics: dict, timing_raw: dict) -> None:
        """Compute what needs no reward, for the whole batch: old and reference log-probabilities, values."""
        with marked_timer("old_log_prob", timing_raw, color="blue"):
            self._compute_old_log_prob(copy(batch.whole), metrics=metrics)
        if self.use_reference_policy:
            with marked_timer("ref", timing_raw, color="olive"):
                self._compute_ref_log_prob(copy(batch.whole), metrics=metrics)
        if self.use_critic:
            with marked_timer("values", timing_raw, color="cyan"):
                self._compute_values(copy(batch.whole), metrics=metrics)

    def _train(self, batch: StepBatch, count: int | None, timing_raw: dict) -> None:
        """Compute the advantages of complete groups, and update on the mini-batches that are full after that.

        A group may have more or fewer rows than ``n``. As in verl, a mini-batch is a fixed number of rows, not of
        groups.

        ``count`` is the number of groups; ``None`` for all groups that are left.
        """
        rows = batch.take_groups(batch.complete_groups(self.replay_buffer.unfinished())[:count])
        part_metrics: dict = {}
        learners: list[str] = []
        if rows:  # otherwise, all rollouts of the groups failed
            try:
                part = self._learners(select(batch.whole, rows))
                with simple_timer("adv", timing_raw):
                    self._compute_advantage(part, metrics=part_metrics)
                learners = part.keys
            except NothingToLearnError as error:
                batch.nothing = error
        batch.add(rows, learners)
        batch.metrics.add_step_metrics(part_metrics, sample_count=len(learners))
        size = self._get_required_batch_multiple(self._data_parallel_size())
        if not self._by_mini_batch:
            size *= max(1, math.ceil(len(batch.rows) / size))  # one update call in a step, as verl makes
        for rows, padding in batch.take_updates(size, last=count is None):
            update_metrics: dict = {}
            self._update(self._padded(batch.whole, rows, padding), update_metrics, timing_raw)
            batch.updates += 1
            batch.metrics.add_step_metrics(update_metrics, sample_count=len(rows))

    def _padded(self, whole: KVBatchMeta, rows: list[int], padding: list[int]) -> KVBatchMeta:
        """Return rows in an order that gives each rank about the same number of tokens."""
        filler = select(whole, padding)
        self._mask(filler.keys)
        # These rows are as many as verl needs, so it adds no padding of its own.
        return self._balance_batch(select(whole, rows + padding), metrics={})

    def _update(self, rows: KVBatchMeta, metrics: dict, timing_raw: dict) -> None:
        if self.use_critic:
            with simple_timer("update_critic", timing_raw):
                self._update_critic(copy(rows), metrics=metrics)
        if self.config.trainer.critic_warmup <= self.global_steps:
            with simple_timer("update_actor", timing_raw):
                self._update_actor(copy(rows), metrics=metrics)

    def _finish_step(self, batch: StepBatch, metrics: dict) -> KVBatchMeta:
        if not batch.trained and batch.nothing is not None:
            raise batch.nothing
        metrics.update(batch.metrics.get_aggregated_metrics())
        self._judged += [reward.judging for reward in self._rewards.trajectories.values() if reward.judging]
        # Only the prompts: verl deletes the trajectories after it has written metrics and files from them.
        clear(batch.uids, "train")
        metrics["reward_pipeline/prompts_ahead"] = len(self._submitted)
        if self._filters:
            metrics["reward_pipeline/filtered_share"] = self._forecast.share
        self._forecast.end_step()
        metrics["reward_pipeline/update_calls"] = batch.updates
        versions = [tag["min_global_steps"] for tag in batch.whole.tags if not tag.get("is_padding")]
        # In training steps: how much older than those of this step the weights are that generated each trajectory.
        staleness = [self.global_steps - 1 - version for version in versions]
        metrics["reward_pipeline/off_policy_steps"] = float(max(staleness))
        metrics["reward_pipeline/off_policy_share"] = sum(map(bool, staleness)) / len(staleness)
        others = set(range(len(batch.whole.keys))).difference(batch.trained)
        self._left_out |= {batch.whole.keys[row]: batch.whole.tags[row] for row in sorted(others)}
        return select(batch.whole, sorted(batch.trained))

    @override
    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        # verl's timer of the step contains the checkpoint.
        step = timing_raw["step"] - timing_raw.get("save_checkpoint", 0.0)
        generation, waiting = timing_raw.get("gen", 0.0), timing_raw.get("wait_reward", 0.0)
        metrics.update(overlap_metrics(step, generation=generation, waiting=waiting, judged=self._judged))
        if self._records is not None:
            self._records.write_overlap(self.global_steps, waiting, seconds_of(self._judged))

    def _trajectories(self, uids: list[str]) -> KVBatchMeta:
        trajectories = read_trajectories(set(uids))
        if not trajectories.keys:
            raise RewardLoopError(
                f"no rollout of the batch was generated. {last_failure()}. "
                "trainer.v1.sampler.sync_refill_failed_groups=True replaces groups that failed"
            )
        return trajectories

    def _data_parallel_size(self) -> int:
        return max(self.actor_rollout_wg._dispatch_info["actor"]) + 1


@dataclass
class StepBatch:
    """The rows of a training step, from the end of its generation: which of them can be trained on next.

    A row is in one of `groups`, then in `rows` or in `spare`, and then in a mini-batch.
    """

    uids: list[str]
    """The uids of its prompts."""
    whole: KVBatchMeta
    """All rows, including verl's padding."""
    groups: dict[str, list[int]]
    """The groups that have not been trained on: prompt uid -> positions of its rows in `whole`."""
    spare: list[int]
    """The rows that can pad a mini-batch: verl's padding, and rows without a reward."""
    rows: list[int] = field(default_factory=list)
    """Rows that have an advantage, and wait until their mini-batch is full."""
    trained: list[int] = field(default_factory=list)
    """Rows with an advantage that have been in a mini-batch."""
    metrics: MetricsAggregator = field(default_factory=MetricsAggregator)
    updates: int = 0
    """The number of update calls to the workers."""
    nothing: RewardLoopError | None = None
    """Why a part of the batch has no advantage."""

    @classmethod
    def of(cls, uids: list[str], whole: KVBatchMeta) -> Self:
        """Return the batch of these prompts, oldest first; ``whole`` are the rows of their rollouts, and padding."""
        # Also for a prompt whose rollouts all failed: the group is complete, and has no rows.
        groups: dict[str, list[int]] = {uid: [] for uid in uids}
        spare = []
        for position, (key, tag) in enumerate(zip(whole.keys, whole.tags, strict=True)):
            if tag.get("is_padding"):
                spare.append(position)
            else:
                groups[uid_of(key)].append(position)
        return cls(uids, whole, groups, spare)

    def complete_groups(self, unfinished: Collection[str]) -> list[str]:
        """Return the uids of the groups that can be trained on next, in order: all their rewards have arrived."""
        return [uid for uid in self.groups if uid not in unfinished]

    def ready_mini_batches(self, unfinished: Collection[str], total: int, size: int) -> int:
        """Return how many mini-batches have all their rewards, including those already trained on.

        ``total`` is the number of mini-batches of the step, and ``size`` the number of groups in one.
        """
        complete = len(self.complete_groups(unfinished))
        if complete == len(self.groups):
            return total
        trained = len(self.uids) - len(self.groups)
        # The last mini-batch takes all groups that are left, so it is ready only with all of them.
        return min(total - 1, (trained + complete) // size)

    def take_groups(self, uids: list[str]) -> list[int]:
        """Remove these groups from `groups`, and return their rows."""
        # In the order in which verl has balanced the batch over the ranks.
        return sorted(row for uid in uids for row in self.groups.pop(uid))

    def add(self, rows: list[int], learners: Sequence[str]) -> None:
        """Add rows of complete groups: those with these keys to `rows`, the others to `spare`."""
        there = set(learners)
        for row in rows:
            (self.rows if self.whole.keys[row] in there else self.spare).append(row)

    def take_updates(self, size: int, *, last: bool) -> list[tuple[list[int], list[int]]]:
        """Remove the rows of update calls from `rows`. Returns the rows of each, and the rows that pad it.

        Rows of a small last call would weigh many times as much as others. So if fewer rows than those of a call will
        be left, a full call waits for them, and all calls that are left get the same number of rows.

        Args:
            size: the number of rows of an update call: those of a mini-batch, or of several.
            last: whether all groups are complete.
        """
        made = []
        coming = sum(map(len, self.groups.values()))

        def is_full() -> bool:
            left = len(self.rows) - size + coming
            return len(self.rows) >= size and (left == 0 or left >= size)

        while self.rows if last else is_full():
            count = math.ceil(len(self.rows) / math.ceil(len(self.rows) / size)) if last else size
            rows, self.rows = self.rows[:count], self.rows[count:]
            missing = size - len(rows)
            padding, self.spare = self.spare[:missing], self.spare[missing:]
            self.trained += rows
            made.append((rows, padding))
        return made
