"""verl's agent loop, with trajectories published before their rewards are in.

verl holds a trajectory back until it is judged. Here it goes to TransferQueue as soon as it is generated, and its
reward follows; so the trainer can put the rollout engine to sleep, and compute what needs no reward, while judges work.
A session still lasts until its reward is in: verl's own prompt statuses keep their meaning.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import transfer_queue as tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

__all__ = ["PipelineAgentLoopManager", "PipelineAgentLoopWorker"]

GENERATED = "generated"
"""Tags a prompt whose sessions have all been generated. It is no status: verl refuses those that it does not know."""

Session = tuple[str, int]
"""A prompt's uid, and the number of the session."""


class PipelineAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """Publishes a training trajectory first, and its reward when it comes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._generating: dict[str, set[int]] = {}
        self._judging: dict[Session, asyncio.Task[None] | None] = {}

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        uid = prompt["uid"]
        if not trajectory["validate"]:
            n = prompt.get("__rollout_n__", self.config.actor_rollout_ref.rollout.n)
            self._generating[uid] = set(range(n))
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)
        finally:
            self._generating.pop(uid, None)

    async def _run_agent_loop(self, sampling_params: dict, trajectory: dict, **kwargs: Any) -> Any:
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        finally:
            # A session that failed before it published anything will publish nothing.
            await self._note_generated(kwargs["uid"], kwargs["session_id"])

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        if validate:
            return await super()._agent_loop_postprocess(output, validate, **kwargs)
        session = (kwargs["uid"], kwargs["session_id"])
        self._judging[session] = None
        try:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            await self._note_generated(*session)
            judging = self._judging[session]
            if judging is not None:
                await judging
                await self._publish_reward(output if isinstance(output, list) else [output], session)
        finally:
            judging = self._judging.pop(session)
            if judging is not None:
                judging.cancel()
        return None

    async def _compute_score(self, outputs: list[Any], kwargs: dict) -> None:
        session = (kwargs["uid"], kwargs["session_id"])
        if session in self._judging:
            self._judging[session] = asyncio.create_task(super()._compute_score(outputs, kwargs))
        else:
            # Only training is judged beside generation: the limits of a service share their turns by this.
            await super()._compute_score(outputs, {**kwargs, "__validate__": True})

    async def _note_generated(self, uid: str, session_id: int) -> None:
        left = self._generating.get(uid)
        if left and session_id in left:
            left.discard(session_id)
            if not left:
                await tq.async_kv_put(key=uid, partition_id="train", tag={GENERATED: True})

    async def _publish_reward(self, outputs: list[Any], session: Session) -> None:
        final = outputs[-1]
        if final.reward_score is None:
            return
        keys, fields = [], []
        for index, output in enumerate(outputs):
            output.reward_score = final.reward_score
            output.extra_fields["reward_extra_info"] = final.extra_fields["reward_extra_info"]
            published = output.as_dict()
            keys.append(f"{session[0]}_{session[1]}_{index}")
            fields.append({"rm_scores": published["rm_scores"], "extra_fields": published["extra_fields"]})
        await tq.async_kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(fields), partition_id="train")


class PipelineAgentLoopManager(AgentLoopManagerTQ):
    """Starts :class:`PipelineAgentLoopWorker`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(PipelineAgentLoopWorker)
