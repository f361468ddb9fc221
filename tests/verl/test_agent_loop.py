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


async def test_it_says_what_it_is_at() -> None:
    worker = object.__new__(PipelineAgentLoopWorker)
    worker._generating = {"a": {1, 0}, "b": set(), "c": set()}
    task = object()
    worker._judging = {("a", 2): task, ("b", 1): task, ("b", 0): task, ("c", 0): None}  # type: ignore[dict-item]
    assert await worker.in_work() == {
        "a": "sessions [0, 1] are being generated, sessions [2] are being judged",
        "b": "sessions [0, 1] are being judged",
        "c": "its results are being written",
    }


@pytest.mark.parametrize(("published", "told"), [(False, [("failed", "a_1: KeyError: 'tool'")]), (True, [])])
async def test_it_tells_why_a_rollout_failed(
    published: bool, told: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyError("tool")

    monkeypatch.setattr(AgentLoopWorkerTQ.__ray_actor_class__, "_run_agent_loop", fail)
    worker = object.__new__(PipelineAgentLoopWorker)
    worker._generating, worker._unpublished = {"a": {0}}, {"a": {0} if published else {0, 1}}
    worker._unjudged, worker._rewards = {"a": {0, 1}}, {"a": {}}
    worker._news, worker._told = [], asyncio.Event()
    with pytest.raises(KeyError):
        await worker._run_agent_loop({}, {}, uid="a", session_id=1)
    assert worker._news == told
    assert worker._unpublished == {"a": {0}}


async def test_that_the_engine_is_done_is_told_before_the_trajectories_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = object.__new__(PipelineAgentLoopWorker)
    stages: Any = {"a": {0, 1}}, {"a": {0, 1}}, {"a": {0, 1}}
    worker._generating, worker._unpublished, worker._unjudged = stages
    worker._judging, worker._rewards = {}, {"a": {}}
    worker._news, worker._told = [], asyncio.Event()
    written: list[list[Event]] = []

    async def write(*args: Any, **kwargs: Any) -> None:
        written.append(list(worker._news))

    monkeypatch.setattr(AgentLoopWorkerTQ.__ray_actor_class__, "_agent_loop_postprocess", write)
    monkeypatch.setattr(agent_loop.tq, "async_kv_put", write)
    for session in range(2):
        await worker._agent_loop_postprocess([], False, uid="a", session_id=session)
    # Two trajectories, and the tag of their prompt.
    assert written == [[], [("generated", "a")], [("generated", "a")]]
    assert worker._news == [("generated", "a"), ("published", "a")]
