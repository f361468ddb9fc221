"""verl's agent loop, with trajectories published before their rewards arrive.

verl writes a trajectory to TransferQueue only with its reward. Here, the trajectory is written as soon as it is
generated, and the rewards of its group are written later. So the trainer can put the rollout engine to sleep, and
compute what needs no reward, while samples are judged.

A training session has these parts, all within verl's task for the session (`_run_agent_loop`):

1. verl generates the trajectory, and calls `_agent_loop_postprocess`.
2. verl's `_agent_loop_postprocess` calls `_compute_score`, which starts a task that judges the trajectory: verl's own
   `_compute_score`. Then it writes the trajectory, without a reward.
3. Our `_agent_loop_postprocess` waits for the reward, and stores it.
4. The last session of a prompt writes the rewards of the group.

A session ends only when its reward has arrived, so verl's own prompt statuses keep their meaning.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from typing import Any

import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from reward_loop.types import Outcome
from reward_loop.verl.agent_loop_workers import ReplacingAgentLoopManager, WatchedAgentLoopWorker
from reward_loop.verl.progress import GENERATED, Event

__all__ = ["PipelineAgentLoopManager", "PipelineAgentLoopWorker"]

EVENTS_S = 30.0
"""Seconds after which a call of `next_events` returns even if there is no event, so that no call stays open
indefinitely."""

Session = tuple[str, int]
"""A prompt's uid, and the index of the session."""


class PipelineAgentLoopWorker(WatchedAgentLoopWorker):
    """An agent loop worker that publishes a training trajectory first, and its reward later. A Ray actor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._generating: dict[str, set[int]] = {}
        """Prompt uid -> its sessions that are being generated; `_unpublished` and `_unjudged` are alike."""
        self._unpublished: dict[str, set[int]] = {}
        self._unjudged: dict[str, set[int]] = {}
        self._judging: dict[Session, asyncio.Task[None]] = {}
        """The task that judges a session, from the end of generation to the end of judging."""
        self._rewards: dict[str, dict[str, dict[str, Any]]] = {}
        """Prompt uid -> trajectory key -> its reward, for rewards that have arrived and are not published."""
        self._events: list[Event] = []
        self._has_events = asyncio.Event()

    async def next_events(self) -> list[Event]:
        """Returns the events since the last call. Waits up to `EVENTS_S` seconds for the first one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVENTS_S):
                await self._has_events.wait()
        self._has_events.clear()
        events, self._events = self._events, []
        return events

    async def unfinished_prompts(self) -> dict[str, str]:
        """Returns, for each unfinished prompt, which sessions are being generated or judged, as text."""
        judged: dict[str, list[int]] = defaultdict(list)
        for uid, session in self._judging:
            judged[uid].append(session)
        prompts = {}
        for uid, sessions in self._generating.items():
            states = {"generated": sorted(sessions), "judged": sorted(judged[uid])}
            texts = [f"sessions {numbers} are being {state}" for state, numbers in states.items() if numbers]
            prompts[uid] = ", ".join(texts) or "its results are being written"
        return prompts

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        self._has_events.set()

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
            self._emit(("over", uid))
        return None

    async def _run_agent_loop(self, sampling_params: dict, trajectory: dict, **kwargs: Any) -> Any:
        session = (kwargs["uid"], kwargs["session_id"])
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        except Exception as error:
            if session[1] in self._unpublished.get(session[0], ()):
                self._emit(("failed", f"{_name(session)}: {type(error).__name__}: {error}"))
            raise
        finally:
            # A session that failed before it published its trajectory will not publish one.
            self._end_generation(*session)
            await self._end_publishing(*session)
            await self._end_judging(*session)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        if validate:
            return await super()._agent_loop_postprocess(output, validate, **kwargs)
        session = (kwargs["uid"], kwargs["session_id"])
        self._end_generation(*session)
        try:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            await self._end_publishing(*session)
            if session in self._judging:
                await self._take_reward(output if isinstance(output, list) else [output], session)
        finally:
            if session in self._judging:
                await self._stop_judging(session)
        return None

    async def _compute_score(self, outputs: list[Any], kwargs: dict, **options: Any) -> None:
        """Starts to judge a training session in a task, and judges a validation sample.

        verl calls this method before it writes a trajectory. There is nothing to judge if the agent loop itself has set
        a score, or if the trainer sends the whole batch to the reward workers.

        Args:
            outputs: the outputs of the session.
            kwargs: the prompt's columns, uid and session.
            options: further arguments of newer versions of verl, passed on.
        """
        session = (kwargs["uid"], kwargs["session_id"])
        if kwargs["uid"] not in self._rewards:
            return await super()._compute_score(outputs, kwargs, **options)  # a validation sample
        if outputs[-1].reward_score is None and self.reward_loop_worker_handles is not None:
            # `_agent_loop_postprocess` waits for the task after verl has written the trajectory.
            self._judging[session] = asyncio.create_task(super()._compute_score(outputs, kwargs, **options))
            self._emit(("judging", _name(session)))
        return None

    async def _stop_judging(self, session: Session) -> None:
        """Ends the task that judges a session. It still runs only if the trajectory could not be written."""
        judging = self._judging[session]
        try:
            judging.cancel()  # no effect after the reward has arrived
            await asyncio.gather(judging, return_exceptions=True)
        finally:
            del self._judging[session]
            self._emit(("judged", _name(session)))

    def _end_generation(self, uid: str, session_id: int) -> None:
        if _remove(self._generating, uid, session_id):
            self._emit(("generated", uid))

    async def _end_publishing(self, uid: str, session_id: int) -> None:
        if _remove(self._unpublished, uid, session_id):
            await tq.async_kv_put(key=uid, partition_id="train", tag={GENERATED: True})
            self._emit(("published", uid))

    async def _end_judging(self, uid: str, session_id: int) -> None:
        """Publishes the rewards of a prompt when the last of its sessions ends.

        One write per group is enough, because the trainer uses only complete groups.
        """
        if _remove(self._unjudged, uid, session_id) and (rewards := self._rewards[uid]):
            fields = list_of_dict_to_tensordict(list(rewards.values()))
            await tq.async_kv_batch_put(keys=list(rewards), fields=fields, partition_id="train")

    async def _take_reward(self, outputs: list[Any], session: Session) -> None:
        """Waits for the reward of a session, and stores it.

        If judging raises, the session is masked: its trajectory has been published already, and the other samples of
        the group stay usable.
        """
        final = outputs[-1]
        try:
            await self._judging[session]
        except Exception as error:
            final.reward_score = 0.0
            final.extra_fields["reward_extra_info"] = {
                "reward_outcome": str(Outcome.FAILED),
                "reward_masked": True,
                "reward_error": f"{type(error).__name__}: {error}",
            }
            self._store_reward(outputs, session)
            raise
        self._store_reward(outputs, session)

    def _store_reward(self, outputs: list[Any], session: Session) -> None:
        final = outputs[-1]
        for index, output in enumerate(outputs):
            output.reward_score = final.reward_score
            output.extra_fields["reward_extra_info"] = final.extra_fields["reward_extra_info"]
            published = output.as_dict()
            self._rewards[session[0]][f"{_name(session)}_{index}"] = {
                "rm_scores": published["rm_scores"],
                "extra_fields": published["extra_fields"],
            }


def _remove(stage: dict[str, set[int]], uid: str, session_id: int) -> bool:
    """Removes a session from a stage. Returns whether it was the last session of its prompt in this stage."""
    left = stage.get(uid, set())
    if session_id not in left:
        return False
    left.discard(session_id)
    return not left


def _name(session: Session) -> str:
    """Returns ``{uid}_{session}``, the start of the keys of its trajectories."""
    return f"{session[0]}_{session[1]}"


class PipelineAgentLoopManager(ReplacingAgentLoopManager):
    """verl's agent loop manager, with :class:`PipelineAgentLoopWorker` as its workers."""

    worker_class = PipelineAgentLoopWorker
