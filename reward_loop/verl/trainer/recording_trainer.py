"""What is observed of each training step: its phases and advantages for the records, and the live numbers."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from omegaconf import DictConfig
from typing_extensions import override
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from reward_loop.config import RewardLoopConfig
from reward_loop.health import HealthWatch, StepNumbers
from reward_loop.managers.base import open_records
from reward_loop.records import HealthRecords, Records, WaitsFor
from reward_loop.types import Outcome
from reward_loop.verl.options import RewardSettings
from reward_loop.verl.run.job import RunningJob
from reward_loop.verl.samples import final_outputs, session_of, uid_of
from reward_loop.verl.tq_rows import read_rows
from reward_loop.verl.trainer.replay_buffer import RewardReplayBuffer
from reward_loop.verl.trainer.reward_metrics import StepRewards

logger = logging.getLogger(__name__)

SAMPLED_RESPONSES = 256
"""The largest number of responses of a step that are examined for repetition."""

SAMPLED_TOKENS = 2048
"""The largest number of tokens of a response that are examined: its last ones."""


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


class RecordingTrainer(PPOTrainer):
    """The part of `RewardLoopTrainer` that records events and advantages in ``reward_loop.log_dir``.

    All timings of verl and of the trainer modes go through ``timing_raw``, so their sums equal verl's ``timing_s/*``.
    """

    _settings: RewardSettings
    _colocated: Any
    _rewards: StepRewards
    replay_buffer: RewardReplayBuffer
    _records: Records | None = None
    """``None`` if nothing is recorded."""
    _timing_raw: dict[str, float]

    def __init__(self, config: DictConfig) -> None:
        # The subclass has set `_settings` before.
        self._records = open_records(self._settings.options)
        super().__init__(config)

    @property
    def timing_raw(self) -> dict[str, float]:
        """The seconds of the current step, by the name of the timing. verl sets it at the start of each step."""
        return self._timing_raw

    @timing_raw.setter
    def timing_raw(self, seconds: dict[str, float]) -> None:
        if self._records is None:
            self._timing_raw = seconds
            return
        self._timing_raw = RecordedSeconds(self._record_phase)
        self._timing_raw.update(seconds)

    @override
    def fit(self, agent_loop_manager: Any) -> None:
        """Train, and then write the remaining events."""
        try:
            super().fit(agent_loop_manager)
        finally:
            if self._records is not None:
                self._records.flush()

    def _record_phase(self, name: str, seconds: float) -> None:
        assert self._records is not None
        end = time.time()
        self._records.write_phase(name, self.global_steps, end - seconds, end, self._waits_for(name))

    def _waits_for(self, phase: str) -> WaitsFor | None:
        """Return what the trainer waits for in a phase."""
        if phase in ("reward", "wait_reward"):
            return "rewards"
        if phase not in ("gen", "switch_wait"):
            return None
        # In the mode `reward_pipeline`, the wait for rewards is a phase of its own.
        return "rewards" if self._colocated is None and self._settings.mode.pipeline is None else "rollouts"

    @override
    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if self._records is not None:
            try:
                self._records.write_advantages(self.global_steps, advantages(self._rewards))
            except Exception:  # observability must not stop a run
                logger.exception("the advantages of step %d are not recorded", self.global_steps)


def advantages(rewards: StepRewards) -> dict[str, float | None]:
    """Return the advantage of each sample in the batch of a step by uid; ``None`` if it is not trained on.

    The advantage is the mean over the tokens that are trained on.
    """
    keys = final_outputs(rewards.trained)
    columns = read_rows(keys, "train", "advantages", "response_mask")
    found: dict[str, float | None] = {session_of(key)[0]: None for key in final_outputs(rewards.trajectories)}
    for key, (values, mask) in zip(keys, columns, strict=True):
        trained = values[mask.bool()]
        found[session_of(key)[0]] = float(trained.mean()) if len(trained) else None
    return found


class StepHealth:
    """Computes the live numbers of each training step. Without records, those of judges have no values.

    The reward workers count the requests to judges.

    Args:
        options: the options of the run.
        job: what is true of the whole job.
    """

    def __init__(self, options: RewardLoopConfig, job: RunningJob) -> None:
        self._options = options
        self._job = job
        self._watch = HealthWatch(options.health)
        self._records = HealthRecords(options.log_dir) if options.log_dir else None

    def metrics(self, step: int, rewards: StepRewards) -> dict[str, float]:
        """Return the numbers of a step, and log and record the warnings that begin with it.

        An error is logged, and does not stop the run.
        """
        if not self._options.health.enabled or not rewards.trajectories:
            return {}
        try:
            values, warnings = self._watch.check(self._numbers(step, rewards))
        except Exception:  # observability must not stop a run
            logger.exception("the numbers of reward_loop.health failed in step %d", step)
            return {}
        where = f" Records: {self._options.log_dir}." if self._options.log_dir else ""
        for warning in warnings:
            logger.warning("reward_loop.health.%s: %s%s", warning.monitor, warning.message, where)
        if self._records is not None:
            self._records.write_values(step, values)
            self._records.write_warnings([dataclasses.asdict(warning) for warning in warnings])
        metrics = {f"reward_loop/health/{name}": value for name, value in values.items()}
        return metrics | {"reward_loop/health/warnings": float(self._watch.active)}

    def flush(self) -> None:
        """Wait until all values and warnings are in the records, at most ten seconds."""
        if self._records is not None:
            self._records.flush()

    def _numbers(self, step: int, rewards: StepRewards) -> StepNumbers:
        by_key = rewards.samples()
        keys, samples = list(by_key), list(by_key.values())
        _, groups = np.unique([uid_of(key) for key in keys], return_inverse=True)
        sampled = keys[:: math.ceil(len(keys) / SAMPLED_RESPONSES)]
        counts = self._job.exchange_counts()
        return StepNumbers(
            step=step,
            rewards=np.array([np.nan if sample.is_masked else sample.reward for sample in samples]),
            groups=groups,
            lengths=np.array([sample.tokens for sample in samples]),
            unscored=sum(sample.outcome == Outcome.UNSCORED for sample in samples),
            responses=[row.numpy()[-SAMPLED_TOKENS:] for (row,) in read_rows(sampled, "train", "responses")],
            calls=counts["calls"],
            without_verdict=counts["without_verdict"],
            seconds=np.array(counts["seconds"], dtype=float),
        )
