"""verl's V1 trainer with rewards from the reward loop, for every trainer mode, and what it records of each step."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import ray
from omegaconf import DictConfig
from ray.exceptions import OutOfMemoryError, RayActorError
from typing_extensions import override
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from reward_loop.errors import RewardLoopError
from reward_loop.managers.base import open_records
from reward_loop.managers.failures import Failures
from reward_loop.records import WaitsFor, cleaned, resumed_row
from reward_loop.types import Outcome, RewardResult
from reward_loop.verl.installed import replaced
from reward_loop.verl.options import MINI_BATCH_ESTIMATORS, without_reward
from reward_loop.verl.run.services import RewardServices
from reward_loop.verl.samples import final_outputs, uid_of
from reward_loop.verl.tq_rows import (
    MASKS,
    KVBatchMeta,
    TrajectoryReward,
    clear,
    copy,
    field_names,
    read_rewards,
    read_sessions,
    select,
    spread_learners,
    write_rewards,
    zero,
)
from reward_loop.verl.trainer.replay_buffer import RewardReplayBuffer, extend
from reward_loop.verl.trainer.resume import reset_unscored_prompts, restore_usage, save_usage
from reward_loop.verl.trainer.reward_metrics import (
    StepHealth,
    StepRewards,
    advantages,
    only_numbers,
    without_baseline,
)
from reward_loop.verl.workers.agent_loop import RewardAgentLoopManager
from reward_loop.verl.workers.reward_workers import RewardWorkers

__all__ = ["NothingToLearnError", "with_reward_loop"]


logger = logging.getLogger(__name__)

GROUP_ESTIMATORS = MINI_BATCH_ESTIMATORS | {"gpg", "reinforce_plus_plus_baseline"}
"""verl's advantage estimators that compute a sample's baseline from its group."""


class NothingToLearnError(RewardLoopError):
    """No sample of an update has a score to learn from."""


class RecordedSeconds(dict[str, float]):
    """verl's timings of a step, as a dict that calls a function whenever seconds are added: then a phase has ended.

    verl calls nothing at the end of a phase: it only adds the seconds to this dict.

    Args:
        ended: called with the name of the phase, and its seconds.
    """

    def __init__(self, ended: Callable[[str, float], None]) -> None:
        super().__init__()
        self._ended = ended

    def __setitem__(self, name: str, seconds: float) -> None:
        added = seconds - self.get(name, 0.0)
        super().__setitem__(name, seconds)
        if added > 0:
            self._ended(name, added)


def within(seconds: float | None, call: Callable[[], None], message: str) -> None:
    """Call a function that waits inside verl, where no wait has a deadline: in a daemon thread, which may hang.

    Args:
        seconds: the deadline; ``None`` for none.
        call: the function.
        message: of the error.

    Raises:
        RewardLoopError: the time is over.
    """
    ended: Future[None] = Future()

    def run() -> None:
        try:
            call()
            ended.set_result(None)
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    try:
        ended.result(seconds)
    except TimeoutError:
        if ended.done():  # an error of the function
            raise
        raise RewardLoopError(message) from None


class RewardLoopTrainer(PPOTrainer):
    """Overrides of verl's trainer. Mixed in before the class of a trainer mode by :func:`with_reward_loop`.

    Args:
        config: verl's whole configuration.
        rewards: the settings of rewards, and the services that run.
    """

    replay_buffer: RewardReplayBuffer
    _timing_raw: dict[str, float]

    def __init__(self, config: DictConfig, rewards: RewardServices) -> None:
        # Before verl's constructor, which calls `_build_replay_buffer`.
        self._settings = rewards.settings
        self._router = rewards.router
        self._colocated = rewards.colocated
        self._job = rewards.job
        self._records = open_records(rewards.settings.options)
        """``None`` if nothing is recorded."""
        self._rewards = StepRewards()
        """The rewards of the current step."""
        self._left_out: dict[str, dict[str, Any]] = {}
        """The training rows of the current step that left the batch, because they have no reward: key -> tags."""
        self._validated: dict[str, TrajectoryReward] = {}
        """The rewards of the current validation, by key."""
        self._run_config = config
        config = without_reward(config)  # verl would start reward workers and servers of its own, too
        super().__init__(config)
        # verl replaces failed groups indefinitely, even if every replacement fails for the same reason.
        self.replay_buffer.checks.append(self._job.check)
        if self._colocated is None:  # its scores come after sampling
            self.replay_buffer.usable = self._usable

    @override
    def on_init_end(self) -> None:
        self._wait_for_weights(super().on_init_end)

    @override
    def on_step_end(self) -> None:
        self._wait_for_weights(super().on_step_end)

    def _wait_for_weights(self, send: Callable[[], None]) -> None:
        seconds = self._settings.mode.sampler.stall_timeout_s
        within(
            seconds,
            send,
            f"step {self.global_steps}: the policy's weights have not reached the rollout servers after {seconds} s "
            "(trainer.v1.sampler.stall_timeout_s): a rank of the trainer or a rollout server does not answer; see the "
            "end of their logs, and what they do by `py-spy dump --pid PID`",
        )

    @override
    def _build_replay_buffer(self) -> Any:
        return extend(super()._build_replay_buffer(), self._settings.mode.sampler)

    @override
    def _setup(self) -> None:
        if self._colocated is None:
            # Start them first: they load while the policy loads.
            self.reward_workers = RewardWorkers(self._settings, self._router, self._job)
        # Here verl creates its own reward loop manager, and loads the checkpoint.
        with replaced(trainer_base, "RewardLoopManager", self._start_rewards):
            super()._setup()
        # The agent loop workers, which verl starts next, get this configuration.
        self._run_config.trainer.total_training_steps = self.total_training_steps
        # On the objects, where verl has bound these methods, too.
        self.actor_rollout_wg.update_actor = self._counting_learners(self.actor_rollout_wg.update_actor)
        if self.use_critic:
            self.critic_wg.train_mini_batch = self._counting_learners(self.critic_wg.train_mini_batch)
        self.reward_workers.wait_until_ready()
        self._health = StepHealth(self._settings.options, self._job)

    def _start_rewards(self, config: DictConfig, rm_resource_pool: Any = None) -> SimpleNamespace:
        """Return what verl's trainer uses of its reward loop manager; first start a colocated reward model.

        verl calls this after it has loaded the trainer's model, and before it starts the rollout. The rollout's engine
        sizes its KV cache by the memory that is free then: without what a sleeping reward model keeps.
        """
        if self._colocated is not None:
            pool = self.resource_pool_manager.get_resource_pool(Role.RewardModel)
            self.reward_workers = RewardWorkers(self._settings, self._colocated.start(pool), self._job)
        # With `None`, verl's agent loop judges nothing, and the trainer calls `_compute_reward_colocate`.
        handles = [self.reward_workers.client] if self._colocated is None else None
        return SimpleNamespace(reward_loop_worker_handles=handles)

    @property
    def timing_raw(self) -> dict[str, float]:
        """The seconds of the current step, by the name of the timing. verl sets it at the start of each step."""
        return self._timing_raw

    @timing_raw.setter
    def timing_raw(self, _: dict[str, float]) -> None:
        self._timing_raw = RecordedSeconds(self._record_phase)

    def _record_phase(self, name: str, seconds: float) -> None:
        if self._records is None:
            return
        waits_for: WaitsFor | None = None
        if name in ("reward", "wait_reward"):
            waits_for = "rewards"
        elif name in ("gen", "switch_wait"):
            # In the mode `reward_pipeline`, the wait for rewards is a phase of its own.
            pipelined = self._settings.mode.pipeline is not None
            waits_for = "rollouts" if pipelined or self._colocated is not None else "rewards"
        end = time.time()
        self._records.write_phase(name, self.global_steps, end - seconds, end, waits_for)

    @override
    def fit(self, agent_loop_manager: Any) -> None:
        """Train, and then stop the agent loop workers and the reward workers.

        Rollouts for later steps may still be judged at the end. They would fail when the job's actor ends.
        """
        if isinstance(agent_loop_manager, RewardAgentLoopManager):  # not one of the user, or of a recipe
            self.replay_buffer.checks.append(agent_loop_manager.check_workers)
        try:
            # Errors also of a validation before the first step.
            with self._checking_job():
                # verl would keep failed rewards, and the run would end with the error of the one before.
                kept = reset_unscored_prompts(judged=self.get_reward_handles() is not None)
                if self._records is not None:
                    validates = self.config.trainer.get("val_before_train", True)
                    self._records.write_rows([resumed_row(self.global_steps, kept, validates=validates)])
                super().fit(agent_loop_manager)
        finally:
            self._health.flush()
            if self._records is not None:
                self._records.flush()
            self._keep_usage()
        # Callers first: agent loop workers call reward workers, and these call the job's actor, which stops last.
        for worker in getattr(agent_loop_manager, "agent_loop_workers", ()):  # a manager of the user may have others
            ray.kill(worker)
        self.reward_workers.stop()

    @override
    def _save_checkpoint(self) -> None:
        # First: verl names the checkpoint as the latest one when it is complete.
        save_usage(self._checkpoint(), self._job)
        super()._save_checkpoint()

    @override
    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        trainer = self.config.trainer
        if self.global_steps:
            is_named = trainer.resume_mode == "resume_path"
            folders = [trainer.resume_from_path] if is_named else [self._checkpoint(), trainer.default_local_dir]
            restore_usage(folders, self._job)

    def _keep_usage(self) -> None:
        """Write what was used of a budget. What was used after the last checkpoint is spent, too."""
        budget = self._settings.options.budget
        if budget.max_cost is None and budget.max_tokens is None:
            return
        try:
            save_usage(self.config.trainer.default_local_dir, self._job)
        except (RewardLoopError, OSError) as error:  # must not hide why the step has failed
            logger.warning("what the run has spent could not be written: %s", error)

    def _checkpoint(self) -> str:
        """Return the folder in which verl keeps the checkpoint of the current step."""
        return os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")

    @override
    def step(self, metrics: dict, timing_raw: dict) -> Any:
        """Run one training step, and add the metrics of its rewards, computed from all samples of the step."""
        self._rewards = StepRewards()
        self._left_out = {}
        try:
            with self._checking_job():
                batch = super().step(metrics, timing_raw)
        finally:
            # Also if the step failed: samples without a score may be the cause.
            results = [reward.result for reward in self._rewards.samples().values()]
            self._say_failures(f"step {self.global_steps}", results)
            self._keep_usage()
        metrics.update(self._rewards.metrics())
        return batch

    def _say_failures(self, of: str, results: Iterable[RewardResult]) -> None:
        """Log one line if samples of a step or validation have no score."""
        folder = self._settings.options.log_dir
        if line := Failures.of(results).line(None if folder is None else f"reward-loop view {folder}"):
            logger.warning("%s: %s", of, line)

    @override
    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> Any:
        """Run one of verl's local updates. An update is skipped if none of its samples has a score.

        Raises:
            NothingToLearnError: this is the last update of the step, and no sample of the whole step has a score.
        """
        try:
            return super()._step_once(metrics, timing_raw, sample_batch_size)
        except NothingToLearnError as error:
            if self.local_trigger_step == self.parameter_sync_step - 1 and not self._rewards.trained:
                raise
            logger.warning("update %d of the step is skipped: %s", self.local_trigger_step + 1, error)
            return KVBatchMeta(partition_id="train", keys=[], tags=[])

    @override
    def _validate(self) -> dict[str, float]:
        """Validate. Samples without a score leave each batch before verl shows or averages anything."""
        self._validated = {}
        try:
            metrics: dict[str, float] = super()._validate()
        except NothingToLearnError as error:
            logger.warning("%s", error)
            metrics = {}
            if self._colocated is not None:
                self.checkpoint_manager.update_weights()  # verl does it after scoring, and wakes the rollout
        rewards = [self._validated[key] for key in final_outputs(self._validated)]
        self._say_failures(f"validation of step {self.global_steps}", [reward.result for reward in rewards])
        outcomes = Counter(reward.result.outcome for reward in rewards)
        counts = {f"val-aux/reward_outcome/{outcome}": float(outcomes[outcome]) for outcome in Outcome if rewards}
        return metrics | counts

    def _scored(self, batch: Any) -> Any:
        """Return a batch of a validation without its masked rows.

        Raises:
            NothingToLearnError: all rows are masked.
        """
        rewards = read_rewards(batch)
        self._validated |= rewards
        masked = [key for key in batch.keys if rewards[key].result.masked]
        if masked:
            clear(masked, batch.partition_id)
        if len(masked) == len(batch.keys):
            raise NothingToLearnError(f"no sample of the validation of step {self.global_steps} has a score")
        return select(batch, [row for row, key in enumerate(batch.keys) if not rewards[key].result.masked])

    @override
    def _val_metrics_update(
        self,
        data_sources: Any,
        sample_uids: Any,
        reward_extra_infos_dict: dict[str, list],
        sample_turns: Any,
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
        # verl counts `acc` 0 for each rollout that was requested and is not there, and fails on lists and dicts.
        masked = Counter(uid_of(key) for key in final_outputs(self._validated) if self._validated[key].result.masked)
        expected = {(source, uid): n - masked[uid] for (source, uid), n in (expected_acc_counts or {}).items()}
        numbers = only_numbers(reward_extra_infos_dict)
        return super()._val_metrics_update(
            data_sources, sample_uids, numbers, sample_turns, expected_acc_counts=expected
        )

    @override
    def _dump_generations(
        self, inputs: Any, outputs: Any, gts: Any, scores: Any, reward_extra_infos_dict: dict[str, list], dump_path: str
    ) -> None:
        """Write rollouts to a file: without padding, and with ``None`` as the score of masked samples."""
        # In verl's column `uid` are the keys of trajectories.
        known, keys = {**self._rewards.trajectories, **self._validated}, reward_extra_infos_dict["uid"]
        rows = [row for row, key in enumerate(keys) if key in known]
        scores = [None if key in known and known[key].result.masked else s for key, s in zip(keys, scores, strict=True)]
        inputs, outputs, gts, scores = ([column[row] for row in rows] for column in (inputs, outputs, gts, scores))
        # verl's writer fails for values that JSON lacks, and the run with it.
        infos = {name: [_readable(values[row]) for row in rows] for name, values in reward_extra_infos_dict.items()}
        super()._dump_generations(inputs, outputs, [_readable(value) for value in gts], scores, infos, dump_path)

    @override
    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if self._records is not None:
            try:
                self._records.write_advantages(self.global_steps, advantages(self._rewards))
            except Exception:  # observability must not stop a run
                logger.exception("the advantages of step %d are not recorded", self.global_steps)
        metrics.update(self._health.metrics(self.global_steps, self._rewards))
        # After this, verl writes the step's rollouts to a file, and deletes them from TransferQueue.
        # Not earlier: verl's metrics read fields, such as advantages, that these rows may lack.
        batch.keys.extend(self._left_out)
        batch.tags.extend(self._left_out.values())

    @contextmanager
    def _checking_job(self) -> Iterator[None]:
        """Raise the reason to stop the run, if there is one, when the block ends or fails.

        verl drops groups that failed; when all failed, it raises an error that does not mention the reward.
        """
        try:
            yield
        except Exception as error:
            self._job.check()
            if isinstance(error, RayActorError | OutOfMemoryError):
                raise RewardLoopError(f"a process of the run died: {error}") from error
            raise
        self._job.check()

    @override
    def _compute_reward_colocate(self, batch: Any, metrics: dict | None = None) -> Any:
        self._judge_colocated(batch)
        return self._usable(batch)

    def _judge_colocated(self, batch: Any) -> None:
        """Score the whole batch after the rollout, with reward models on the trainer's GPUs."""
        assert self._colocated is not None
        keys, rows = read_sessions(batch)
        # Not in verl's `metrics`: verl would average these seconds over the parts of a step, not add them.
        with self._colocated.awake(None if batch.partition_id == "val" else self._rewards.seconds):
            rewards = self.reward_workers.score_batch(rows)
        write_rewards(batch, keys, rewards)

    def _usable(self, batch: Any) -> Any:
        """Return the rows of a scored batch that are trained on, or that a validation shows.

        Before verl balances the batch, and computes log-probabilities: rows that left later would count in baselines,
        advantages and losses, with the score 0.

        Raises:
            NothingToLearnError: no row is left to train on.
            RewardLoopError: the run must stop because of a reward.
        """
        if batch.partition_id == "val":
            return self._scored(batch)
        self._job.check()
        try:
            return self._learners(batch)
        except NothingToLearnError:
            if self._colocated is None:
                self.on_sample_end()  # verl calls it after sampling
            raise

    def _learners(self, batch: Any) -> Any:
        """Return the rows that can be learned from: not masked, and not without a baseline.

        Adds the rewards to those of the step.

        Raises:
            NothingToLearnError: no row is left to train on.
        """
        rewards = read_rewards(batch)
        # Masked rows too: the metrics of the step count outcomes of all samples.
        self._rewards.trajectories.update(rewards)
        masked = {key for key, reward in rewards.items() if reward.result.masked}
        if self.config.algorithm.adv_estimator in GROUP_ESTIMATORS:
            masked |= without_baseline(rewards, masked)
        rows = range(len(batch.keys))
        learners = [i for i in rows if batch.keys[i] in rewards and batch.keys[i] not in masked]
        self._left_out |= {batch.keys[i]: batch.tags[i] for i in rows if batch.keys[i] in masked}
        if not learners:
            log_dir = self._settings.options.log_dir
            where = f". `reward-loop report {log_dir}` shows why, with the replies of judges" if log_dir else ""
            why = Failures.of(reward.result for reward in rewards.values()).line() or "all are masked"
            raise NothingToLearnError(f"no sample of step {self.global_steps} has a score to learn from: {why}{where}")
        return select(batch, learners)

    @override
    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        """Compute the advantages of all rows but the padding, which has none."""
        padding = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding")]
        rows = select(batch, [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding")])
        super()._compute_advantage(rows, metrics)
        self._rewards.trained |= set(rows.keys)
        self._mask(padding)
        # Not verl's result, which lacks the padding.
        return copy(batch)

    @override
    def _update_critic(self, batch: Any, metrics: dict) -> Any:
        super()._update_critic(self._of_mini_batches(batch, self.config.critic.ppo_mini_batch_size), metrics)
        return batch

    @override
    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        size = self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        super()._update_actor(self._of_mini_batches(batch, size), metrics)
        return batch

    def _of_mini_batches(self, batch: Any, prompts: int) -> Any:
        """Return the rows of an update, whose mini-batches have so many prompts, without superfluous padding."""
        is_learner = [key in self._rewards.trained for key in batch.keys]
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        size = prompts * self.config.actor_rollout_ref.rollout.n
        return select(batch, spread_learners(is_learner, ranks, size))

    def _counting_learners(self, update: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a method of a worker group that trains on a batch, with the losses ``seq-mean-*`` divided by rows
        with an advantage.

        verl divides them by the configured number of rows of a mini-batch, which includes padding.
        """

        def call(batch: Any) -> Any:
            learners = len(self._rewards.trained.intersection(batch.keys))
            if learners < len(batch.keys):
                # verl has set both sizes just before this call. The workers divide the batch by this one.
                mini_batches = len(batch.keys) / batch.extra_info["mini_batch_size"]
                batch.extra_info["global_batch_size"] = learners / mini_batches
            return update(batch)

        return call

    def _mask(self, keys: list[str]) -> None:
        """Make padding of training rows: write zeros to the masks, and to all fields of the advantage.

        verl reads only fields that all rows have, so rows without an advantage need the fields too.
        """
        if keys:
            # The trained rows have the last two only with some options of verl.
            fields = {"advantages", "returns", *MASKS, "token_level_rewards", "rollout_is_weights"}
            written = field_names(next(iter(self._rewards.trained)), {}, "train")
            zero(keys, *fields.intersection(written))


def with_reward_loop(trainer: type[PPOTrainer]) -> type[RewardLoopTrainer]:
    """Return a subclass of a mode's trainer that takes its rewards from the reward loop.

    Its constructor takes verl's configuration and the `RewardServices` of the run.

    Args:
        trainer: the trainer class of one of verl's modes, or of a recipe.
    """
    return type(f"RewardLoop{trainer.__name__}", (RewardLoopTrainer, trainer), {})


def _readable(value: Any) -> Any:
    """Return a value as it is read from records."""
    return cleaned({"value": value}).get("value")  # `None` for a value that raises when it is read
