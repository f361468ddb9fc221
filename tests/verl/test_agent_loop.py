"""verl's agent loop worker that publishes trajectories first, without Ray."""

from __future__ import annotations

import pytest

from reward_loop.verl.agent_loop import PipelineAgentLoopWorker

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
