"""verl's agent loop worker that publishes trajectories first, without Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from reward_loop.verl import agent_loop
from reward_loop.verl.agent_loop import PipelineAgentLoopWorker
from reward_loop.verl.progress import Event

pytestmark = pytest.mark.integration  # it imports verl


async def test_unfinished_prompts_are_described() -> None:
    worker = object.__new__(PipelineAgentLoopWorker)
    worker._generating = {"a": {1, 0}, "b": set(), "c": set()}
    task = object()
    worker._judging = {("a", 2): task, ("b", 1): task, ("b", 0): task}  # type: ignore[dict-item]
    assert await worker.unfinished_prompts() == {
        "a": "sessions [0, 1] are being generated, sessions [2] are being judged",
        "b": "sessions [0, 1] are being judged",
        "c": "its results are being written",
    }


@pytest.mark.parametrize(("published", "events"), [(False, [("failed", "a_1: KeyError: 'tool'")]), (True, [])])
async def test_a_failure_before_publishing_is_an_event(
    published: bool, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyError("tool")

    monkeypatch.setattr(AgentLoopWorkerTQ.__ray_actor_class__, "_run_agent_loop", fail)
    worker = object.__new__(PipelineAgentLoopWorker)
    worker._generating, worker._unpublished = {"a": {0}}, {"a": {0} if published else {0, 1}}
    worker._unjudged, worker._rewards = {"a": {0, 1}}, {"a": {}}
    worker._events, worker._has_events = [], asyncio.Event()
    with pytest.raises(KeyError):
        await worker._run_agent_loop({}, {}, uid="a", session_id=1)
    assert worker._events == events
    assert worker._unpublished == {"a": {0}}


async def test_the_end_of_generation_is_an_event_before_the_trajectories_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = object.__new__(PipelineAgentLoopWorker)
    stages: Any = {"a": {0, 1}}, {"a": {0, 1}}, {"a": {0, 1}}
    worker._generating, worker._unpublished, worker._unjudged = stages
    worker._judging, worker._rewards = {}, {"a": {}}
    worker._events, worker._has_events = [], asyncio.Event()
    written: list[list[Event]] = []

    async def write(*args: Any, **kwargs: Any) -> None:
        written.append(list(worker._events))

    monkeypatch.setattr(AgentLoopWorkerTQ.__ray_actor_class__, "_agent_loop_postprocess", write)
    monkeypatch.setattr(agent_loop.tq, "async_kv_put", write)
    for session in range(2):
        await worker._agent_loop_postprocess([], False, uid="a", session_id=session)
    # Two trajectories, and the tag of their prompt.
    assert written == [[], [("generated", "a")], [("generated", "a")]]
    assert worker._events == [("generated", "a"), ("published", "a")]
