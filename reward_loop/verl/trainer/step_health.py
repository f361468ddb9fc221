"""The live numbers of docs/viewer.md in verl's trainer: metrics, warnings in the log, and records."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from reward_loop.config import RewardLoopConfig
from reward_loop.health import HealthWatch, StepNumbers
from reward_loop.records import HealthRecords
from reward_loop.types import Outcome
from reward_loop.verl.run.job import RunningJob
from reward_loop.verl.tq_rows import read_rows
from reward_loop.verl.trainer.reward_metrics import StepRewards
from reward_loop.verl.trajectory_keys import uid_of

logger = logging.getLogger(__name__)

SAMPLED_RESPONSES = 256
"""The largest number of responses of a step that are examined for repetition."""

SAMPLED_TOKENS = 2048
"""The largest number of tokens of a response that are examined: half from its start and half from its end."""


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
        sampled = sampled_keys(keys, groups, SAMPLED_RESPONSES)
        counts = self._job.exchange_counts()
        return StepNumbers(
            step=step,
            rewards=np.array([np.nan if sample.is_masked else sample.reward for sample in samples]),
            groups=groups,
            lengths=np.array([sample.tokens for sample in samples]),
            unscored=sum(sample.outcome == Outcome.UNSCORED for sample in samples),
            responses=[
                ends(response.numpy(), SAMPLED_TOKENS) for (response,) in read_rows(sampled, "train", "responses")
            ],
            calls=counts["calls"],
            without_verdict=counts["without_verdict"],
            seconds=np.array(counts["seconds"], dtype=float),
        )


def sampled_keys(keys: Sequence[str], groups: np.ndarray, size: int) -> list[str]:
    """Return the keys of at most ``size`` samples: whole groups, spread evenly over the step.

    If the groups are larger than ``size``, they are the first samples of one group.
    """
    if len(keys) <= size:
        return list(keys)
    count = int(groups.max()) + 1
    taken = max(1, size * count // len(keys))
    is_chosen = np.isin(groups, np.linspace(0, count - 1, taken).astype(int))
    return [key for key, chosen in zip(keys, is_chosen, strict=True) if chosen][:size]


def ends(tokens: np.ndarray, size: int) -> np.ndarray:
    """Return at most `size` tokens: of a longer response, half of them from its start and half from its end."""
    return tokens if len(tokens) <= size else np.concatenate([tokens[: size - size // 2], tokens[-(size // 2) :]])
