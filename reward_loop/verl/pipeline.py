"""The trainer mode ``reward_pipeline``: training overlaps with the computation of rewards.

*Mini-batch pipeline*: the trainer updates on the groups whose rewards have arrived, while the other groups are still
being judged. *One-step off-policy*: the rollout of step k+1 runs while the rewards of step k arrive; from the second
step on, each step trains on rollouts that are one step old. Each overlap works alone or together with the other.

Invariants:

- The rollout engine does not generate while the trainer computes. A step first waits until every submitted prompt,
  including the prompts of the next step, is generated; then the engine sleeps until the new weights are sent.
- A step trains on the ``train_batch_size`` oldest prompts of ``_submitted``.
- Old and reference log-probabilities and values are computed for the whole batch, before the first update of the step.
- A group (all rollouts of one prompt) is never split: its advantages are computed in one call, when all its rewards
  have arrived.
- Each row of a batch, padding rows included, is passed to ``_update`` exactly once. The masks of a row without an
  advantage are zero.
- The learning-rate schedules move on once in a step, however many update calls the step makes.
- ``generating`` is a subset of ``unpublished``, and ``unpublished`` of ``unfinished`` (the sets of `Progress`). During
  ``fit``, they change only under the lock of the `Listener`.
- The prompt tags in TransferQueue are authoritative. A waiting trainer reads them when it has received no event for
  `RESYNC_S` seconds.

States of a prompt:

========== ============================================= ======================== =============================
State      Begins with                                   In the `Progress` sets   Kept in
========== ============================================= ======================== =============================
generating ``_submit_up_to``, or a resumed checkpoint    generating, unpublished, ``_submitted``
                                                         unfinished
generated  event ``generated``: all sessions are         unpublished, unfinished  ``_submitted``
           generated or have failed
published  event ``published``: the trajectories are in  unfinished               ``_submitted``; from the end of
           TransferQueue                                                          generation, ``_Batch.groups``
complete   event ``over``: all sessions have ended,      none                     ``_submitted`` or
           rewards included; the prompt's status is                               ``_Batch.groups``
           ``finished`` or ``failure``
trained    ``_train``: the rows have an advantage, or    none                     ``_Batch.rows``, until a
           are masked                                                             mini-batch is full
cleared    ``_finish_step``: the rows are deleted from   none                     nowhere
           TransferQueue
evicted    ``_throw_out`` of a complete group: it was    none                     nowhere; a new prompt replaces it
           filtered, or failed without a trajectory
========== ============================================= ======================== =============================

A session is judged as soon as it is generated, so judging overlaps with the first three states. A reward model on the
trainer's GPUs is the exception: sessions end without rewards, and ``_finish_generation`` has the whole batch judged.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.replay_buffer import _accumulate_eviction_metrics
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils.debug import marked_timer

from reward_loop.agent.schedule import Action, Generate, Prepare, Schedule, Train, Wait
from reward_loop.errors import RewardLoopError
from reward_loop.verl.agent_loop import GENERATED
from reward_loop.verl.mode_options import PIPELINE_MODE, read_mode
from reward_loop.verl.progress import Progress, RefillLimit, StepTimes
from reward_loop.verl.reward_metrics import added_seconds
from reward_loop.verl.tq_batches import MASKS, copy, select, zero
from reward_loop.verl.trainer import NothingToLearnError
from reward_loop.verl.training_workers import PipelineActorWorker, PipelineTrainingWorker
from reward_loop.verl.worker_events import Listener

__all__ = ["AGENT_LOOP_MANAGER", "MINI_BATCH_ESTIMATORS", "RewardPipelineTrainer"]

logger = logging.getLogger(__name__)

AGENT_LOOP_MANAGER = "reward_loop.verl.agent_loop.PipelineAgentLoopManager"
"""The agent loop manager that publishes trajectories before their rewards arrive."""

MINI_BATCH_ESTIMATORS = frozenset({"grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo"})
"""Advantage estimators that use only the samples of one group. The others whiten advantages over the whole batch, or
count over it: ``gpg`` counts the non-zero scores."""

RESYNC_S = 2.0
"""Seconds without an event after which the trainer reads the tags in TransferQueue, which are authoritative."""

REPORT_S = 60.0
"""Seconds between two log lines that report what the trainer waits for."""


@dataclass
class _Batch:
    """The batch of a training step, after its generation."""

    uids: list[str]
    """The uids of its prompts."""
    whole: KVBatchMeta
    """All rows, including padding rows."""
    groups: dict[str, list[int]]
    """The groups that have not been trained on: prompt uid -> positions of its rows in `whole`."""
    padding: list[int]
    rows: list[int] = field(default_factory=list)
    """Rows that have an advantage or are masked, and wait until their mini-batch is full."""
    metrics: MetricsAggregator = field(default_factory=MetricsAggregator)
    updates: int = 0
    """The number of update calls to the workers."""
    learnable: bool = False
    """Whether any row has an advantage."""
    nothing: NothingToLearnError | None = None


@register_trainer(PIPELINE_MODE)
class RewardPipelineTrainer(PPOTrainerSync):
    """verl's synchronous, colocated trainer, which runs the parts of a step in the order of a `Schedule`."""

    def __init__(self, config: DictConfig) -> None:
        options = read_mode(config).pipeline
        assert options is not None, f"trainer.v1.trainer_mode must be {PIPELINE_MODE}"
        self.options = options
        with open_dict(config):
            # verl chooses the replay buffer and the data loader by this name: use those of the mode `sync`.
            config.trainer.v1.trainer_mode = "sync"
        super().__init__(config)
        config.trainer.v1.trainer_mode = PIPELINE_MODE  # the name that loggers record
        self._progress = Progress()
        self._submitted: list[str] = []
        """The uids of the submitted prompts that are not in a batch yet, oldest first."""
        self._schedule = self._make_schedule()
        self._actions: Iterator[Action] | None = None
        self._batch: _Batch | None = None
        self._seconds: dict[str, float] = {}
        # During validation, the trainer waits in verl's replay buffer and not in `_wait`.
        self.replay_buffer.checks.append(lambda: self._listener.raise_error())
        self._filters = self.replay_buffer.filter_groups_metric is not None
        self._replaces = self._filters or self.replay_buffer.sync_refill_failed_groups

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            worker = PipelineTrainingWorker if role is Role.Critic else PipelineActorWorker
            self.role_worker_mapping[role] = ray.remote(worker)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        if self.options.one_step_off_policy:
            # With any other name than "sync", verl saves the prompts in flight in its checkpoints.
            self.trainer_mode = PIPELINE_MODE

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        prompts, trajectories = self._look()
        stale = [key for key in trajectories if _uid(key) not in prompts]
        if stale:
            # The checkpoint was written before the batch of its step was cleared.
            tq.kv_clear(keys=stale, partition_id="train")
        again = [uid for uid, tag in prompts.items() if tag["status"] in ("pending", "running")]
        if again:
            # verl generates these prompts again, so the tag is no longer valid.
            tq.kv_batch_put(keys=again, partition_id="train", tags=[{GENERATED: False} for _ in again])
        self._submitted = list(prompts)
        self._progress.submit(again)

    def fit(self, agent_loop_manager: Any) -> None:
        """Trains, while a `Listener` receives the events of the agent loop workers."""
        with Listener(agent_loop_manager.agent_loop_workers, self._progress) as self._listener:
            super().fit(agent_loop_manager)

    def _make_schedule(self) -> Schedule:
        by_mini_batch = self.options.mini_batch_pipeline
        estimator = self.config.algorithm.adv_estimator
        if by_mini_batch and estimator not in MINI_BATCH_ESTIMATORS:
            logger.warning(
                "algorithm.adv_estimator=%s looks at the whole batch, so that mini_batch_pipeline waits for all its "
                "rewards; by mini-batch work %s",
                estimator,
                ", ".join(sorted(MINI_BATCH_ESTIMATORS)),
            )
            by_mini_batch = False
        count = math.ceil(self.config.data.train_batch_size / self._mini_batch_groups) if by_mini_batch else 1
        return Schedule(count, by_mini_batch, self.options.one_step_off_policy)

    @property
    def _mini_batch_groups(self) -> int:
        """The number of groups in a mini-batch: the least common multiple of the actor's and the critic's sizes."""
        sizes = [self.config.actor_rollout_ref.actor.ppo_mini_batch_size]
        if self.use_critic:
            sizes.append(self.config.critic.ppo_mini_batch_size)
        return math.lcm(*sizes)

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        """Runs the actions of the schedule, up to the last update of one training step."""
        self._seconds = {"generation": 0.0, "rewards": 0.0, "judging": 0.0}
        self._batch = None
        with self._listener.lock:
            self._progress.start_step()
        if self._actions is None:
            # verl also stops after the last epoch.
            last_step = min(self.total_training_steps, self.config.trainer.total_epochs * self.steps_per_epoch)
            self._actions = self._schedule.actions(
                last_step - self.global_steps + 1,
                self._ready,
                first_step=self.global_steps,
                generated=len(self._submitted) >= self.config.data.train_batch_size,
            )
        for action in self._actions:
            if isinstance(action, Generate):
                with self._timed("generation", timing_raw, "gen"):
                    self.on_sample_begin()
                    self._submit_up_to(len(self._submitted) + self.config.data.train_batch_size)
                continue
            if self._batch is None:
                self._batch = self._finish_generation(metrics, timing_raw)
            match action:
                case Prepare():
                    self._prepare(self._batch, metrics, timing_raw)
                case Wait(mini_batches=count):
                    with self._timed("rewards", timing_raw, "wait_reward"):
                        self._wait("rewards", self._are_ready(count))
                case Train(first=first, count=count):
                    last = first + count == self._schedule.mini_batches
                    self._train(self._batch, None if last else count * self._mini_batch_groups, timing_raw)
                    if last:
                        break
        assert self._batch is not None
        return self._finish_step(self._batch, metrics)

    def _ready(self, step: int) -> int:
        """The number of mini-batches of the step that have all their rewards, including those already trained on."""
        if self._batch is None:
            return 0
        left, total = len(self._batch.groups), self._schedule.mini_batches
        complete = len(self._complete_groups(self._batch))
        if complete == left:
            return total
        trained = self.config.data.train_batch_size - left
        return min(total - 1, (trained + complete) // self._mini_batch_groups)

    def _complete_groups(self, batch: _Batch) -> list[str]:
        """The uids of the groups that can be trained on next, in order: all their rewards have arrived."""
        unfinished = self._progress.unfinished
        if self.options.order == "submission":
            return list(takewhile(lambda uid: uid not in unfinished, batch.groups))
        return [uid for uid in batch.groups if uid not in unfinished]

    def _are_ready(self, count: int) -> Callable[[], bool]:
        return lambda: self._ready(self.global_steps) >= count

    def _submit_up_to(self, count: int) -> None:
        """Submits new prompts to the rollout until ``_submitted`` has ``count`` prompts."""
        missing = count - len(self._submitted)
        if missing <= 0:
            return
        batch = self._next_train_batch(missing)
        uids = list(batch["uid"])
        with self._listener.lock:
            self._progress.submit(uids)
        self._submitted += uids
        self._submit_batch_to_rollout(batch)

    def _finish_generation(self, metrics: dict, timing_raw: dict) -> _Batch:
        """Waits until all submitted prompts are generated, puts the rollout engine to sleep, and returns the batch."""
        count = len(self._submitted)
        size = self.config.data.train_batch_size
        refills = RefillLimit(self.options.max_refills)
        unpublished, unfinished = self._progress.unpublished, self._progress.unfinished
        # Prompts of the next step need not be published yet: they are written to TransferQueue during training. There
        # are two exceptions. A teacher model runs between generation and publishing. And a group that failed is known
        # only when its last session has ended.
        generating = unpublished if self._replaces or self.use_teacher_policy else self._progress.generating
        if self._replaces and self._throw_out(metrics, refills):
            self._submit_up_to(count)
        while True:
            with self._timed("generation", timing_raw, "gen"):
                self._wait("rollouts", lambda: not generating)
            if not self._replaces:
                break
            if self._filters:
                # The filter needs the rewards, and the engine must be awake to generate replacements.
                with self._timed("rewards", timing_raw, "wait_reward"):
                    self._wait("rewards", lambda: not any(uid in unfinished for uid in self._submitted[:size]))
            else:
                # The status of a failed group is written shortly after its last rollout.
                _, trajectories = self._look()
                empty = set(self._submitted) - {_uid(key) for key in trajectories}
                with self._timed("generation", timing_raw, "gen"):
                    self._wait("rollouts", partial(unfinished.isdisjoint, empty))
            if not self._throw_out(metrics, refills):
                break
            with self._timed("generation", timing_raw, "gen"):
                self._submit_up_to(count)
        uids, self._submitted = self._submitted[:size], self._submitted[size:]
        with self._timed("generation", timing_raw, "gen"):
            self.on_sample_end()
            self._wait("rollouts", lambda: unpublished.isdisjoint(uids))
        trajectories = self._trajectories(uids)
        if self.reward_loop_manager.reward_loop_worker_handles is None:
            # The reward model runs on the trainer's GPUs, so nothing overlaps with judging.
            with self._timed("rewards", timing_raw, "wait_reward"):
                self._compute_reward_colocate(trajectories, metrics)
            self._seconds["judging"] = self._seconds["rewards"]
        whole = copy(self._balance_batch(trajectories, metrics=metrics))
        whole.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        groups: dict[str, list[int]] = {uid: [] for uid in uids}
        padding = []
        for position, (key, tag) in enumerate(zip(whole.keys, whole.tags, strict=True)):
            if tag.get("is_padding"):
                padding.append(position)
            else:
                groups[_uid(key)].append(position)
        return _Batch(uids, whole, groups, padding)

    def _throw_out(self, metrics: dict, refills: RefillLimit) -> bool:
        """Evicts the groups that verl's replay buffer would evict: filtered, or failed without a trajectory.

        Returns:
            Whether any group was evicted.

        Raises:
            RewardLoopError: groups failed and their replacements failed too, more than ``max_refills`` times in a row;
                or replacing the filtered groups would exceed ``max_num_gen_batches``.
        """
        buffer = self.replay_buffer
        buffer._sync_metadata_from_transfer_queue()
        reasons = buffer._terminal_eviction_reasons(self.global_steps, "train")
        thrown, stale, _, why = buffer._evict_terminal_groups(self.global_steps, "train", reasons)
        if thrown:
            self._poll_fatal_error()  # raises if the run must stop: the replacements would fail too
        _accumulate_eviction_metrics(metrics, why, stale)
        self._submitted = [uid for uid in self._submitted if uid not in thrown]
        with self._listener.lock:
            self._progress.forget(thrown)
        failed = len(reasons[2])
        if refills.exhausted(failed=failed, filtered=len(thrown) - failed, kept=len(self._submitted)):
            raise RewardLoopError(
                f"{failed} groups failed, and so did all that replaced them, {self.options.max_refills} times in a row "
                f"(trainer.v1.{PIPELINE_MODE}.max_refills={self.options.max_refills}). {self._last_failure()}"
            )
        if thrown and self._filters:
            self._bound_generation(refills.filtered)
        return bool(thrown)

    def _bound_generation(self, filtered: int) -> None:
        """Raises if replacing the filtered groups would exceed ``algorithm.filter_groups.max_num_gen_batches``."""
        options, size = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        most = options.get("max_num_gen_batches", 0)
        if most > 0 and size + filtered > most * size:
            raise RewardLoopError(
                f"algorithm.filter_groups has thrown out {filtered} groups in step {self.global_steps}: their rollouts "
                f"have the same {options.metric}; more batches of {size} would have to be generated than "
                f"algorithm.filter_groups.max_num_gen_batches={most} allows. Are the prompts too easy or too hard, or "
                "does the reward function give everything the same score? 0 generates for ever"
            )

    def _last_failure(self) -> str:
        with self._listener.lock:
            failure = self._progress.failure
        return f"The last rollout that failed is {failure}" if failure else "See the log of the agent loop workers"

    def _prepare(self, batch: _Batch, metrics: dict, timing_raw: dict) -> None:
        """Computes what needs no reward, for the whole batch: old and reference log-probabilities, values."""
        with marked_timer("old_log_prob", timing_raw, color="blue"):
            self._compute_old_log_prob(copy(batch.whole), metrics=metrics)
        if self.use_reference_policy:
            with marked_timer("ref", timing_raw, color="olive"):
                self._compute_ref_log_prob(copy(batch.whole), metrics=metrics)
        if self.use_critic:
            with marked_timer("values", timing_raw, color="cyan"):
                self._compute_values(copy(batch.whole), metrics=metrics)

    def _train(self, batch: _Batch, count: int | None, timing_raw: dict) -> None:
        """Computes the advantages of complete groups, and updates on the mini-batches that are full after that.

        A group may have more or fewer rows than ``n``. As in verl, a mini-batch is a fixed number of rows, not of
        groups. The workers make no optimizer step for a mini-batch whose rows are all masked.

        Args:
            batch: the batch of the step.
            count: the number of groups; ``None`` for all groups that are left, and the padding rows.
            timing_raw: verl's timings; the seconds are added.
        """
        rows = self._rows_of(batch, self._complete_groups(batch)[:count])
        padding = batch.padding if count is None else []
        part_metrics: dict = {}
        if rows:
            try:
                with added_seconds("adv", timing_raw):
                    self._compute_advantage(select(batch.whole, rows + padding), metrics=part_metrics)
                batch.learnable = True
            except NothingToLearnError as error:
                batch.nothing = error
                self._mask(batch, rows + padding)
        else:
            self._mask(batch, padding)  # all rollouts of the groups failed
        batch.metrics.add_step_metrics(part_metrics, sample_count=len(rows))
        batch.rows += rows + padding
        for mini_batches in self._full_mini_batches(batch):
            update_metrics: dict = {}
            self._update(self._balanced(batch, mini_batches), update_metrics, timing_raw)
            batch.updates += 1
            batch.metrics.add_step_metrics(update_metrics, sample_count=len(mini_batches))

    @property
    def _by_submission(self) -> bool:
        """Whether mini-batches must not depend on the order in which rewards arrive."""
        return self._schedule.mini_batch_pipeline and self.options.order == "submission"

    def _rows_of(self, batch: _Batch, uids: list[str]) -> list[int]:
        """Removes these groups from the batch, and returns their rows."""
        rows = [row for uid in uids for row in batch.groups.pop(uid)]
        if not self._by_submission:
            return sorted(rows)
        place = {uid: number for number, uid in enumerate(uids)}
        return sorted(rows, key=lambda row: (place[_uid(batch.whole.keys[row])], batch.whole.keys[row]))

    def _full_mini_batches(self, batch: _Batch) -> list[list[int]]:
        """Removes the rows of full mini-batches from ``batch.rows``, and returns one list of rows per update call.

        One call is cheaper than several. With ``order=submission``, each mini-batch has its own call: otherwise the
        assignment of rows to ranks, and the rows that ``ppo_epochs`` repeats, would depend on the other mini-batches
        in the call.
        """
        multiple = self._get_required_batch_multiple(self._data_parallel_size())
        full = len(batch.rows) // multiple * multiple
        now, batch.rows = batch.rows[:full], batch.rows[full:]
        size = multiple if self._by_submission else full
        return [now[first : first + size] for first in range(0, full, size)] if full else []

    def _mask(self, batch: _Batch, rows: list[int]) -> None:
        """Excludes rows from the loss: sets their masks and advantages to zero."""
        zero([batch.whole.keys[i] for i in rows], *self._advantage_fields(), *MASKS)

    def _balanced(self, batch: _Batch, rows: list[int]) -> KVBatchMeta:
        """Returns rows in an order that gives each rank about the same number of tokens.

        The whole batch is balanced already, and keeps its order, which decides the rows of each mini-batch.
        """
        if len(rows) == len(batch.whole.keys) and not self._by_submission:
            return select(batch.whole, sorted(rows))
        part = select(batch.whole, rows)
        return self._balance_batch(part, metrics={}) if self._data_parallel_size() > 1 else part

    def _update(self, rows: KVBatchMeta, metrics: dict, timing_raw: dict) -> None:
        if self.use_critic:
            with added_seconds("update_critic", timing_raw):
                self._update_critic(copy(rows), metrics=metrics)
        if self.config.trainer.critic_warmup <= self.global_steps:
            with added_seconds("update_actor", timing_raw):
                self._update_actor(copy(rows), metrics=metrics)

    def _finish_step(self, batch: _Batch, metrics: dict) -> KVBatchMeta:
        if not batch.learnable and batch.nothing is not None:
            raise batch.nothing
        metrics.update(batch.metrics.get_aggregated_metrics())
        if self.use_critic:
            metrics["critic/lr"] = self.critic_wg.lr_scheduler_step()[0]
        if self.config.trainer.critic_warmup <= self.global_steps:
            metrics["actor/lr"] = self.actor_rollout_wg.lr_scheduler_step()[0]
        tq.kv_clear(keys=batch.uids, partition_id="train")
        with self._listener.lock:
            self._seconds["judging"] += self._progress.judging_s()
            metrics["reward_pipeline/rewards_pending"] = self._progress.pending
            metrics["reward_pipeline/rewards_pending_max"] = self._progress.most_pending
            metrics["reward_pipeline/oldest_reward_s"] = self._progress.oldest(time.monotonic())
        metrics["reward_pipeline/prompts_ahead"] = len(self._submitted)
        metrics["reward_pipeline/update_calls"] = batch.updates
        staleness = self._staleness(batch.whole)
        metrics["reward_pipeline/off_policy_steps"] = float(max(staleness))
        metrics["reward_pipeline/off_policy_share"] = sum(map(bool, staleness)) / len(staleness)
        return batch.whole

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, **kwargs)
        step = timing_raw["step"] - timing_raw.get("save_checkpoint", 0.0)
        generation, waiting = self._seconds["generation"], self._seconds["rewards"]
        training = step - generation - waiting
        metrics.update(StepTimes(step, generation, waiting, training, self._seconds["judging"]).metrics())

    def _trajectories(self, uids: list[str]) -> KVBatchMeta:
        wanted = set(uids)
        _, trajectories = self._look()
        rows = {key: tag for key, tag in trajectories.items() if _uid(key) in wanted}
        if not rows:
            raise RewardLoopError(
                f"not one rollout of the batch was generated. {self._last_failure()}. "
                "trainer.v1.sampler.sync_refill_failed_groups=True replaces groups that failed"
            )
        return KVBatchMeta(partition_id="train", keys=list(rows), tags=list(rows.values()))

    def _staleness(self, batch: KVBatchMeta) -> list[int]:
        """Returns, for each trajectory, how many training steps older its weights are than those of this step."""
        versions = [tag["min_global_steps"] for tag in batch.tags if not tag.get("is_padding")]
        return [self.global_steps - 1 - version for version in versions]

    def _data_parallel_size(self) -> int:
        return max(self.actor_rollout_wg._dispatch_info["actor"]) + 1

    def _look(self) -> tuple[dict[str, dict], dict[str, dict]]:
        """Returns the tags of the prompts, and the tags of the trajectories, that are in TransferQueue."""
        items = (tq.kv_list("train") or {}).get("train", {})
        prompts = {key: tag for key, tag in items.items() if tag.get("is_prompt")}
        return prompts, {key: tag for key, tag in items.items() if key not in prompts}

    def _wait(self, what: str, arrived: Callable[[], bool]) -> None:
        """Waits until ``arrived`` returns true.

        Raises:
            RewardLoopError: an agent loop worker died, or there was no event for ``stall_timeout_s`` seconds.
        """
        events = self._progress.events
        began = last_news = last_report = time.monotonic()
        try:
            while not self._listener.wait(arrived, RESYNC_S):
                now = time.monotonic()
                if self._progress.events == events:
                    self._resync()
                if self._progress.events != events:
                    events, last_news = self._progress.events, now
                elif self.options.stall_timeout_s is not None and now - last_news > self.options.stall_timeout_s:
                    raise RewardLoopError(
                        f"nothing happened for {now - last_news:.0f} s while the trainer waited for {what} "
                        f"(trainer.v1.{PIPELINE_MODE}.stall_timeout_s={self.options.stall_timeout_s:g})"
                    )
                if now - last_report > REPORT_S:
                    generating, unfinished = len(self._progress.generating), len(self._progress.unfinished)
                    logger.info(
                        "still waiting for %s after %.0f s: %d prompts are being generated, %d have no reward yet",
                        *(what, now - began, generating, unfinished - generating),
                    )
                    last_report = now
        except RewardLoopError as error:
            with self._listener.lock:
                missing = set(self._progress.unfinished)
            raise RewardLoopError(f"{error}. Missing:\n  {self._listener.at_work_on(missing)}") from error

    def _resync(self) -> None:
        """Reads the prompt tags in TransferQueue, and records events that the workers have not reported."""
        prompts, _ = self._look()
        with self._listener.lock:
            for uid, tag in prompts.items():
                if uid in self._progress.unfinished and tag["status"] in ("finished", "failure"):
                    self._progress.happened(("over", uid), time.monotonic())
                elif uid in self._progress.unpublished and tag.get(GENERATED):
                    self._progress.happened(("published", uid), time.monotonic())

    @contextmanager
    def _timed(self, part: str, timing_raw: dict, name: str) -> Iterator[None]:
        """Adds the seconds of the block to ``part`` of the step, and to verl's timing ``name``."""
        began = time.monotonic()
        with added_seconds(name, timing_raw):
            try:
                yield
            finally:
                self._seconds[part] += time.monotonic() - began


def _uid(key: str) -> str:
    """Returns the prompt's uid from a trajectory's key, ``{uid}_{session}_{index}``."""
    return key.split("_")[0]
