"""The monitors of docs/health.md in verl's trainer: metrics, warnings in the log, and records."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import numpy as np
import transfer_queue as tq

from reward_loop.config import RewardLoopConfig
from reward_loop.health import HealthWatch, JudgeCalls, Observation
from reward_loop.records.health import open_health, values_row, warning_row
from reward_loop.types import Outcome, returned_numbers
from reward_loop.verl.reward_metrics import Info, StepRewards, is_scored
from reward_loop.verl.trajectory_keys import final_outputs, uid_of
from reward_loop.verl.workers import RewardWorkers

__all__ = ["StepHealth"]

logger = logging.getLogger(__name__)


class StepHealth:
    """Runs the monitors on each training step. Without records, the monitors of judges have no values.

    Args:
        options: the options of the run.
        workers: the reward workers, which count the requests to judges.
    """

    def __init__(self, options: RewardLoopConfig, workers: RewardWorkers) -> None:
        self._options = options
        self._workers = workers
        self._watch = HealthWatch(options.health)
        self._records = open_health(options.log_dir) if options.log_dir else None

    def metrics(self, step: int, rewards: StepRewards, partition_id: str) -> dict[str, float]:
        """Returns the values of the monitors for a step, and logs and records the warnings that begin with it.

        An error of a monitor is logged, and does not stop the run.
        """
        if not self._options.health.enabled or not rewards.infos:
            return {}
        try:
            found = self._watch.check(self._observe(step, rewards, partition_id))
        except Exception:  # observability must not stop a run
            logger.exception("the monitors of reward_loop.health failed in step %d", step)
            return {}
        for warning in found.warnings:
            where = f" Records: {self._options.log_dir}." if self._options.log_dir else ""
            logger.warning("reward_loop.health.%s: %s%s", warning.monitor, warning.message, where)
        if self._records is not None:
            warnings = [warning_row(**dataclasses.asdict(warning)) for warning in found.warnings]
            self._records.write_rows([values_row(step, found.values), *warnings])
        metrics = {f"reward_loop/health/{name}": value for name, value in found.values.items()}
        return metrics | {"reward_loop/health/warnings": float(found.active)}

    def flush(self) -> None:
        """Waits until all values and warnings are in the records, at most ten seconds."""
        if self._records is not None:
            self._records.flush()

    def _observe(self, step: int, rewards: StepRewards, partition_id: str) -> Observation:
        keys = final_outputs(rewards.infos)
        infos = [rewards.infos[key] for key in keys]
        # Both the score and the length of a response are in `rm_scores`: it has one entry for each token.
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["rm_scores"])
        rows = data["rm_scores"].unbind()
        masked = [bool(info.get("reward_masked")) for info in infos]
        _, groups = np.unique([uid_of(key) for key in keys], return_inverse=True)
        options = self._options.health
        return Observation(
            step=step,
            rewards=np.array([np.nan if out else float(row.sum()) for row, out in zip(rows, masked, strict=True)]),
            groups=groups,
            lengths=np.array([len(row) for row in rows]),
            scores=np.array(
                [rewards.raw_scores[key] if is_scored(info) else np.nan for key, info in zip(keys, infos, strict=True)]
            ),
            components=_components(infos),
            unscored=sum(info.get("reward_outcome") == Outcome.UNSCORED for info in infos),
            responses=_responses(
                sampled_keys(keys, groups, options.sampled_responses), partition_id, options.sampled_tokens
            ),
            judges=self._judges(),
        )

    def _judges(self) -> JudgeCalls | None:
        if self._records is None:
            return None
        counts = self._workers.exchange_counts()
        seconds = [duration for count in counts for duration in count["seconds"]]
        return JudgeCalls(
            calls=sum(count["calls"] for count in counts),
            without_verdict=sum(count["without_verdict"] for count in counts),
            seconds=np.array(seconds, dtype=float),
        )


def sampled_keys(keys: Sequence[str], groups: np.ndarray, size: int) -> list[str]:
    """Returns the keys of at most ``size`` samples: whole groups, spread evenly over the step.

    If the groups are larger than ``size``, they are the first samples of one group.
    """
    if len(keys) <= size:
        return list(keys)
    count = int(groups.max()) + 1
    taken = max(1, size * count // len(keys))
    is_chosen = np.isin(groups, np.linspace(0, count - 1, taken).astype(int))
    return [key for key, chosen in zip(keys, is_chosen, strict=True) if chosen][:size]


def _responses(keys: Sequence[str], partition_id: str, tokens: int) -> list[np.ndarray]:
    data = tq.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=["responses"])
    return [row[:tokens].numpy() for row in data["responses"].unbind()]


def _components(infos: Sequence[Info]) -> Mapping[str, np.ndarray]:
    """Returns the numbers that the function returned, without the measurements of the reward loop."""
    numbers = [returned_numbers(info) for info in infos]
    names = dict.fromkeys(name for of_sample in numbers for name in of_sample if name != "score")
    return {name: np.array([of_sample.get(name, np.nan) for of_sample in numbers]) for name in names}
