"""Adds to verl's agent loop worker a record of each rollout: the times of generation and of the reward.

Rollouts of a validation are marked for the reward workers, too.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from reward_loop.managers.base import VALIDATE
from reward_loop.records import Records, records
from reward_loop.records.events import rollout_event
from reward_loop.records.writer import MAX_BYTES

__all__ = ["RecordingAgentLoopWorker"]

_times: ContextVar[dict[str, float] | None] = ContextVar("times", default=None)
"""The times of the fields ``end``, ``scoring`` and ``scored`` of the current session's event."""


class RecordingAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """Records each session, in the folder ``reward_loop.log_dir``. A Ray actor."""

    _records: Records | None = None
    """``None`` if nothing is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._records = _open_records(self.config)

    async def _run_agent_loop(self, sampling_params: dict, trajectory: dict, **kwargs: Any) -> Any:
        if self._records is None:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        start, error = time.time(), None
        times: dict[str, float] = {}
        token = _times.set(times)
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            _times.reset(token)
            session = (kwargs["uid"], kwargs["session_id"], kwargs.get("global_steps"))
            validate = bool(trajectory["validate"])
            event = rollout_event(*session, validate=validate, start=start, times=times, error=error)
            self._records.write_event(event)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        _mark("end")
        if validate:
            kwargs[VALIDATE] = True  # a column of the sample
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def _compute_score(self, outputs: list[Any], kwargs: dict, **options: Any) -> None:
        # `options`: further arguments of newer versions of verl.
        is_scored = outputs[-1].reward_score is None and self.reward_loop_worker_handles is not None
        if is_scored:
            _mark("scoring")
        await super()._compute_score(outputs, kwargs, **options)
        if is_scored:
            _mark("scored")


def _mark(name: str) -> None:
    times = _times.get()
    if times is not None:
        times[name] = time.time()


def _open_records(config: DictConfig) -> Records | None:
    folder = OmegaConf.select(config, "reward_loop.log_dir")
    max_bytes = OmegaConf.select(config, "reward_loop.record.max_bytes")
    return None if folder is None else records(folder, MAX_BYTES if max_bytes is None else max_bytes)
