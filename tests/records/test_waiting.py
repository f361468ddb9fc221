from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reward_loop import NaiveRewardLoopManager, RewardSample, limit
from reward_loop.records import active_samples
from tests.support.clock import until


def waits() -> dict[str | None, list[str]]:
    """What the samples of this test wait for, by their uid."""
    return {call.sample.uid: list(call.asking) for call in active_samples() if call.sample.data_source == "waiting"}


async def awaits(solution_str: str) -> float:
    async with limit("judge"):
        await asyncio.Event().wait()
    return 1.0


def holds(solution_str: str) -> float:

    from reward_loop import limit

    with limit("judge"):
        threading.Event().wait()
    return 1.0


@pytest.mark.integration
@pytest.mark.parametrize(
    ("function", "name", "options"),
    [
        (awaits, "judge", {}),
        (holds, "judge", {}),
    ],
)
async def test_waiting_for_a_limit_is_shown(function: Callable[..., Any], name: str, options: dict[str, Any]) -> None:
    config = {"limits": {name: {"max_concurrent": 1}}, **options}
    manager = NaiveRewardLoopManager(config, compute_score=function)
    samples = [RewardSample(f"q{i}", uid=f"q{i}", data_source="waiting") for i in range(2)]
    tasks = [asyncio.create_task(manager.run_single(sample)) for sample in samples]
    try:
        await until(lambda: [f"limit {name!r}"] in waits().values())
        assert sorted(waits().values()) == [[], [f"limit {name!r}"]]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.to_thread(manager.close)
    assert waits() == {}


@pytest.mark.parametrize(
    ("options", "waits_for"),
    [({"max_threads": 1}, "a free thread"), ({"isolation": "process", "max_processes": 1}, "a free process")],
)
async def test_waiting_for_a_free_worker_is_shown(tmp_path: Path, options: dict[str, Any], waits_for: str) -> None:
    go = tmp_path / "go"
    manager = NaiveRewardLoopManager(options, compute_score=until_there)
    tasks = [
        asyncio.create_task(manager.run_single(RewardSample(str(go), uid=uid, data_source="waiting")))
        for uid in ("q0", "q1")
    ]
    try:
        await until(lambda: described() == {"q0": [], "q1": [waits_for]})
    finally:
        go.touch()
        await asyncio.wait(tasks)
        await asyncio.to_thread(manager.close)
    assert described() == {}


def until_there(solution_str: str) -> float:
    while not os.path.exists(solution_str):
        time.sleep(0.01)
    return 1.0


def described() -> dict[str | None, list[str]]:
    """What the watchdog logs for the samples of this test, by their uid."""
    return {call.sample.uid: call.waits() for call in active_samples() if call.sample.data_source == "waiting"}
