"""Rewards in RL-Insight, verl's monitor: with ``rl_insight`` in ``trainer.logger``."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Any

from omegaconf import DictConfig
from verl.utils.tracking import RLInsightLogger

from reward_loop.managers.base import generated_step_of, uid_of
from reward_loop.types import RESERVED_KEYS, Reward, RewardSample
from reward_loop.verl.compat import uses

__all__ = ["RewardSpans"]

uses(
    __name__,
    "verl.utils.tracking:RLInsightLogger",
    "enabled()",
    "init(project_name, experiment_name, config)",
    "trace_state(state_name, state_lane_id)",
    "trace_span(name, start_time_ns, end_time_ns, attributes)",
)

_REPORTED = RESERVED_KEYS - {"reward_error", "reward_cause"}
"""Keys of ``reward_extra_info``. Errors may contain surrogates from the model's text, which OTLP cannot encode."""


class RewardSpans:
    """Reports each sample of a reward worker as a span ``reward``.

    The worker's lane in the timeline, ``reward_worker_N`` beside verl's ``replica_N``, shows when it scored any sample.

    Args:
        config: verl's whole configuration.
        position: the number of the worker.
    """

    def __init__(self, config: DictConfig, position: int) -> None:
        trainer = config.trainer
        # Without the other options, with which verl would register the metrics of TransferQueue.
        options = {"trainer": {"rl_insight": trainer.get("rl_insight")}}
        RLInsightLogger.init(trainer.project_name, trainer.experiment_name, options)
        self._lane = f"reward_worker_{position}"

    @classmethod
    def of(cls, config: DictConfig, position: int) -> RewardSpans | None:
        """Return the spans of a worker, or ``None`` if the run does not use RL-Insight."""
        return cls(config, position) if RLInsightLogger.enabled() else None

    async def around(self, data: Any, scoring: Awaitable[Reward]) -> Reward:
        """Await the reward of a sample, and report it."""
        start = time.time_ns()
        with RLInsightLogger.trace_state("reward", state_lane_id=self._lane):
            reward = await scoring
        info = reward["reward_extra_info"]
        attributes = _names(data) | {key: info[key] for key in _REPORTED if key in info}
        attributes["reward_score"] = reward["reward_score"]
        RLInsightLogger.trace_span("reward", start_time_ns=start, end_time_ns=time.time_ns(), attributes=attributes)
        return reward


def _names(data: Any) -> dict[str, Any]:
    if isinstance(data, RewardSample):
        uid, step = data.uid, data.step if data.generated_step is None else data.generated_step
    else:
        row = {name: column[-1] for name, column in data.non_tensor_batch.items()}
        uid, step = uid_of(row), generated_step_of(row)
    return {"uid": uid or "", "global_steps": "" if step is None else step}
