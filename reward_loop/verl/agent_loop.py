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
from collections.abc import Collection
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


class _Prompt:
    """A training prompt, and what is left to do for its sessions, which are numbered."""

    def __init__(self, uid: str, sessions: Collection[int]) -> None:
        self.uid = uid
        self.generating, self.unpublished, self.unjudged = set(sessions), set(sessions), set(sessions)
        self.judging: dict[int, asyncio.Task[None]] = {}
        """The task that judges a session, from the end of generation to the end of judging."""
        self.rewards: dict[str, dict[str, Any]] = {}
        """Trajectory key -> its reward, for rewards that have arrived and are not published."""

    def name(self, session: int) -> str:
        """Returns ``{uid}_{session}``, the start of the keys of the session's trajectories."""
        return f"{self.uid}_{session}"


class PipelineAgentLoopWorker(WatchedAgentLoopWorker):
    """An agent loop worker that publishes a training trajectory first, and its reward later. A Ray actor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompts: dict[str, _Prompt] = {}
        """The unfinished training prompts by uid. Prompts of a validation are not among them."""
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
        texts = {}
        for uid, prompt in self._prompts.items():
            states = {"generated": sorted(prompt.generating), "judged": sorted(prompt.judging)}
            parts = [f"sessions {sessions} are being {state}" for state, sessions in states.items() if sessions]
            texts[uid] = ", ".join(parts) or "its results are being written"
        return texts

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        self._has_events.set()

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        uid = prompt["uid"]
        if trajectory["validate"]:
            return await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)
        sessions = range(prompt.get("__rollout_n__", self.config.actor_rollout_ref.rollout.n))
        self._prompts[uid] = _Prompt(uid, sessions)
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)
        finally:
            del self._prompts[uid]
            self._emit(("over", uid))
        return None

    async def _run_agent_loop(self, sampling_params: dict, trajectory: dict, **kwargs: Any) -> Any:
        prompt, session = self._prompts.get(kwargs["uid"]), kwargs["session_id"]
        if prompt is None:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        except Exception as error:
            if session in prompt.unpublished:
                self._emit(("failed", f"{prompt.name(session)}: {type(error).__name__}: {error}"))
            raise
        finally:
            # A session that failed before it published its trajectory will not publish one.
            self._end_generation(prompt, session)
            await self._end_publishing(prompt, session)
            await _end_judging(prompt, session)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        prompt, session = self._prompts.get(kwargs["uid"]), kwargs["session_id"]
        if prompt is None:
            return await super()._agent_loop_postprocess(output, validate, **kwargs)
        self._end_generation(prompt, session)
        try:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            await self._end_publishing(prompt, session)
            if session in prompt.judging:
                await _take_reward(output if isinstance(output, list) else [output], prompt, session)
        finally:
            if session in prompt.judging:
                await self._stop_judging(prompt, session)
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
        prompt, session = self._prompts.get(kwargs["uid"]), kwargs["session_id"]
        if prompt is None:
            return await super()._compute_score(outputs, kwargs, **options)
        if outputs[-1].reward_score is None and self.reward_loop_worker_handles is not None:
            # `_agent_loop_postprocess` waits for the task after verl has written the trajectory.
            prompt.judging[session] = asyncio.create_task(super()._compute_score(outputs, kwargs, **options))
            self._emit(("judging", prompt.name(session)))
        return None

    async def _stop_judging(self, prompt: _Prompt, session: int) -> None:
        """Ends the task that judges a session. It still runs only if the trajectory could not be written."""
        judging = prompt.judging[session]
        try:
            judging.cancel()  # no effect after the reward has arrived
            await asyncio.gather(judging, return_exceptions=True)
        finally:
            del prompt.judging[session]
            self._emit(("judged", prompt.name(session)))

    def _end_generation(self, prompt: _Prompt, session: int) -> None:
        if _remove_last(prompt.generating, session):
            self._emit(("generated", prompt.uid))

    async def _end_publishing(self, prompt: _Prompt, session: int) -> None:
        if _remove_last(prompt.unpublished, session):
            await tq.async_kv_put(key=prompt.uid, partition_id="train", tag={GENERATED: True})
            self._emit(("published", prompt.uid))


async def _end_judging(prompt: _Prompt, session: int) -> None:
    """Publishes the rewards of a prompt when the last of its sessions ends.

    One write per group is enough, because the trainer uses only complete groups.
    """
    if _remove_last(prompt.unjudged, session) and prompt.rewards:
        fields = list_of_dict_to_tensordict(list(prompt.rewards.values()))
        await tq.async_kv_batch_put(keys=list(prompt.rewards), fields=fields, partition_id="train")


def _remove_last(sessions: set[int], session: int) -> bool:
    """Removes a session. Returns whether it was there, and was the last one."""
    if session not in sessions:
        return False
    sessions.remove(session)
    return not sessions


async def _take_reward(outputs: list[Any], prompt: _Prompt, session: int) -> None:
    """Waits for the reward of a session, and stores it.

    If judging raises, the session is masked: its trajectory has been published already, and the other samples of the
    group stay usable.
    """
    final = outputs[-1]
    try:
        await prompt.judging[session]
    except Exception as error:
        final.reward_score = 0.0
        final.extra_fields["reward_extra_info"] = {
            "reward_outcome": str(Outcome.FAILED),
            "reward_masked": True,
            "reward_error": f"{type(error).__name__}: {error}",
        }
        _store_reward(outputs, prompt, session)
        raise
    _store_reward(outputs, prompt, session)


def _store_reward(outputs: list[Any], prompt: _Prompt, session: int) -> None:
    final = outputs[-1]
    for index, output in enumerate(outputs):
        output.reward_score = final.reward_score
        output.extra_fields["reward_extra_info"] = final.extra_fields["reward_extra_info"]
        published = output.as_dict()
        prompt.rewards[f"{prompt.name(session)}_{index}"] = {
            "rm_scores": published["rm_scores"],
            "extra_fields": published["extra_fields"],
        }


class PipelineAgentLoopManager(ReplacingAgentLoopManager):
    """verl's agent loop manager, with :class:`PipelineAgentLoopWorker` as its workers."""

    worker_class = PipelineAgentLoopWorker
