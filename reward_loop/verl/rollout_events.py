"""Adds to verl's agent loop worker a record of each rollout: the times of generation and of the reward."""

from __future__ import annotations

import time
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from reward_loop.records import Records, records
from reward_loop.records.events import rollout_event
from reward_loop.records.writer import MAX_BYTES

__all__ = ["RecordingAgentLoopWorker"]


class RecordingAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """Records each session, in the folder ``reward_loop.log_dir``. A Ray actor."""

    _records: Records | None = None
    """``None`` if nothing is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._records = _open_records(self.config)
        self._times: dict[tuple[str, int], dict[str, float]] = {}
        """For each session: the times of the fields ``end``, ``scoring`` and ``scored`` of its event."""

    async def _run_agent_loop(self, sampling_params: dict, trajectory: dict, **kwargs: Any) -> Any:
        if self._records is None:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        session = (kwargs["uid"], kwargs["session_id"])
        start, error = time.time(), None
        times = self._times[session] = {}
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            del self._times[session]
            step, validate = kwargs.get("global_steps"), bool(trajectory["validate"])
            event = rollout_event(*session, step, validate=validate, start=start, times=times, error=error)
            self._records.write_event(event)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        self._mark("end", kwargs)
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def _compute_score(self, outputs: list[Any], kwargs: dict, **options: Any) -> None:
        # `options`: further arguments of newer versions of verl.
        is_scored = outputs[-1].reward_score is None and self.reward_loop_worker_handles is not None
        if is_scored:
            self._mark("scoring", kwargs)
        await super()._compute_score(outputs, kwargs, **options)
        if is_scored:
            self._mark("scored", kwargs)

    def _mark(self, name: str, kwargs: dict) -> None:
        if self._records is not None:
            self._times[kwargs["uid"], kwargs["session_id"]][name] = time.time()


def _open_records(config: DictConfig) -> Records | None:
    folder = OmegaConf.select(config, "reward_loop.log_dir")
    max_bytes = OmegaConf.select(config, "reward_loop.record.max_bytes")
    return None if folder is None else records(folder, MAX_BYTES if max_bytes is None else max_bytes)
