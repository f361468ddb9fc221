"""verl's agent loop, with trajectories published before their rewards arrive.

verl publishes a trajectory only when it has its reward. Here, the trajectory is written to TransferQueue as soon as it
is generated, and the rewards of its group are written later. So, while judges work, the trainer can put the rollout
engine to sleep and compute what needs no reward. A session still ends only when its reward has arrived, so verl's own
prompt statuses keep their meaning.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from typing import Any

import ray
import transfer_queue as tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from reward_loop.types import Outcome
from reward_loop.verl.progress import Event

__all__ = ["PipelineAgentLoopManager", "PipelineAgentLoopWorker"]

GENERATED = "generated"
"""The tag of a prompt whose sessions have all been generated and published. It is not a value of the tag ``status``,
because verl rejects unknown statuses."""

NEWS_S = 30.0
"""Seconds after which a call of ``news`` returns even if there is no event, so that no call stays open indefinitely."""

Session = tuple[str, int]
"""A prompt's uid, and the index of the session."""


class PipelineAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """An agent loop worker that publishes a training trajectory first, and its reward later. A Ray actor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._generating: dict[str, set[int]] = {}
        self._unpublished: dict[str, set[int]] = {}
        self._judging: dict[Session, asyncio.Task[None] | None] = {}
        self._unjudged: dict[str, set[int]] = {}
        self._rewards: dict[str, dict[str, dict[str, Any]]] = {}
        """Prompt uid -> trajectory key -> its reward, for rewards that have arrived and are not published."""
        self._news: list[Event] = []
        self._told = asyncio.Event()

    async def news(self) -> list[Event]:
        """Returns the events since the last call. Waits up to `NEWS_S` seconds for the first one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NEWS_S):
                await self._told.wait()
        self._told.clear()
        news, self._news = self._news, []
        return news

    async def in_work(self) -> dict[str, str]:
        """Returns, for each unfinished prompt, which sessions are being generated or judged, as text."""
        judged: dict[str, list[int]] = defaultdict(list)
        for (uid, session), task in self._judging.items():
            if task is not None:
                judged[uid].append(session)
        work = {}
        for uid, sessions in self._generating.items():
            at = {"generated": sorted(sessions), "judged": sorted(judged[uid])}
            said = [f"sessions {numbers} are being {what}" for what, numbers in at.items() if numbers]
            work[uid] = ", ".join(said) or "its results are being written"
        return work

    def _tell(self, event: Event) -> None:
        self._news.append(event)
        self._told.set()

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        uid = prompt["uid"]
        if trajectory["validate"]:
            return await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)
        sessions = range(prompt.get("__rollout_n__", self.config.actor_rollout_ref.rollout.n))
        stages = self._generating, self._unpublished, self._unjudged
        for stage in stages:
            stage[uid] = set(sessions)
        self._rewards[uid] = {}
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)
        finally:
            for stage in stages:
                del stage[uid]
            del self._rewards[uid]
            self._tell(("over", uid))
        return None

    async def _run_agent_loop(self, sampling_params: dict, trajectory: dict, **kwargs: Any) -> Any:
        session = (kwargs["uid"], kwargs["session_id"])
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        except Exception as error:
            if session[1] in self._unpublished.get(session[0], ()):
                self._tell(("failed", f"{_name(session)}: {type(error).__name__}: {error}"))
            raise
        finally:
            # A session that failed before it published its trajectory will not publish one.
            self._note_generated(*session)
            await self._note_published(*session)
            await self._note_judged(*session)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        if validate:
            return await super()._agent_loop_postprocess(output, validate, **kwargs)
        session = (kwargs["uid"], kwargs["session_id"])
        self._judging[session] = None
        self._note_generated(*session)
        try:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            await self._note_published(*session)
            judging = self._judging[session]
            if judging is not None:
                await self._await_reward(output if isinstance(output, list) else [output], session, judging)
        finally:
            judging = self._judging.pop(session)
            if judging is not None:
                judging.cancel()
                self._tell(("judged", _name(session)))
        return None

    async def _compute_score(self, outputs: list[Any], kwargs: dict) -> None:
        session = (kwargs["uid"], kwargs["session_id"])
        if self.reward_loop_worker_handles is None:
            return  # The trainer sends the whole batch to the reward workers.
        if session in self._judging and outputs[-1].reward_score is None:
            self._judging[session] = asyncio.create_task(super()._compute_score(outputs, kwargs))
            self._tell(("judging", _name(session)))
        else:
            # A validation sample: `__validate__` gives it the traffic class `validate` in the limits.
            await super()._compute_score(outputs, {**kwargs, "__validate__": True})

    def _note_generated(self, uid: str, session_id: int) -> None:
        if _is_last(self._generating, uid, session_id):
            self._tell(("generated", uid))

    async def _note_published(self, uid: str, session_id: int) -> None:
        if _is_last(self._unpublished, uid, session_id):
            await tq.async_kv_put(key=uid, partition_id="train", tag={GENERATED: True})
            self._tell(("published", uid))

    async def _note_judged(self, uid: str, session_id: int) -> None:
        """Publishes the rewards of a prompt when the last of its sessions ends.

        One write per group is enough, because the trainer uses only complete groups.
        """
        if _is_last(self._unjudged, uid, session_id) and (rewards := self._rewards[uid]):
            fields = list_of_dict_to_tensordict(list(rewards.values()))
            await tq.async_kv_batch_put(keys=list(rewards), fields=fields, partition_id="train")

    async def _await_reward(self, outputs: list[Any], session: Session, judging: asyncio.Task[None]) -> None:
        """Waits for the reward of a session, and stores it.

        If judging raises, the session is masked: its trajectory has been published already, and the other samples of
        the group stay usable.
        """
        final = outputs[-1]
        try:
            await judging
        except Exception as error:
            final.reward_score = 0.0
            final.extra_fields["reward_extra_info"] = {
                "reward_outcome": str(Outcome.FAILED),
                "reward_masked": True,
                "reward_error": f"{type(error).__name__}: {error}",
            }
            self._take_reward(outputs, session)
            raise
        self._take_reward(outputs, session)

    def _take_reward(self, outputs: list[Any], session: Session) -> None:
        final = outputs[-1]
        for index, output in enumerate(outputs):
            output.reward_score = final.reward_score
            output.extra_fields["reward_extra_info"] = final.extra_fields["reward_extra_info"]
            published = output.as_dict()
            self._rewards[session[0]][f"{_name(session)}_{index}"] = {
                "rm_scores": published["rm_scores"],
                "extra_fields": published["extra_fields"],
            }


def _is_last(stage: dict[str, set[int]], uid: str, session_id: int) -> bool:
    """Removes a session from a stage. Returns whether it was the last session of its prompt in this stage."""
    left = stage.get(uid, set())
    if session_id not in left:
        return False
    left.discard(session_id)
    return not left


def _name(session: Session) -> str:
    """Returns ``{uid}_{session}``, the start of the keys of its trajectories."""
    return f"{session[0]}_{session[1]}"


class PipelineAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent loop manager, with :class:`PipelineAgentLoopWorker` as its workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(PipelineAgentLoopWorker)
