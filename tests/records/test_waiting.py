from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reward_loop import NaiveRewardLoopManager, RewardLoopManagerBase, RewardSample, TransientError, limit
from reward_loop.managers import BatchRewardLoopManager, GroupRewardLoopManager
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


async def unlimited(solution_str: str) -> float:
    await asyncio.Event().wait()
    return 1.0


@pytest.mark.integration
@pytest.mark.parametrize(
    ("function", "name", "options"),
    [
        (awaits, "judge", {}),
        (unlimited, "default", {}),
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


async def test_waiting_for_the_next_attempt_is_shown() -> None:
    async def busy(solution_str: str) -> float:
        raise TransientError("busy", retry_after=600)

    manager = NaiveRewardLoopManager({"retry": {"max_seconds": 3600}}, compute_score=busy)
    task = asyncio.create_task(manager.run_single(RewardSample("q0", uid="q0", data_source="waiting")))
    await until(lambda: waits() == {"q0": ["the pause before the next attempt"]})
    task.cancel()
    await asyncio.wait([task])


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


@pytest.mark.parametrize(
    ("manager_class", "options", "name"),
    [
        (BatchRewardLoopManager, {"batch": {"max_batch_size": 2, "max_wait_ms": 600_000}}, "batch"),
        (GroupRewardLoopManager, {"group": {"size": 2}}, "group"),
    ],
)
async def test_waiting_for_the_other_samples_of_a_batch_is_shown(
    manager_class: type[RewardLoopManagerBase], options: dict[str, Any], name: str
) -> None:
    go = asyncio.Event()

    async def scores(solution_strs: list[str]) -> list[float]:
        await go.wait()
        return [1.0] * len(solution_strs)

    manager = manager_class(options, compute_score=scores)
    samples = [RewardSample("x", uid=f"q{i}", data_source="waiting", group="g") for i in range(2)]
    tasks = [asyncio.create_task(manager.run_single(samples[0]))]
    await until(lambda: described() == {"q0": [f"the other samples of its {name}"]})
    tasks.append(asyncio.create_task(manager.run_single(samples[1])))
    await until(lambda: described() == {"q0": [], "q1": []})
    go.set()
    await asyncio.wait(tasks)


def described() -> dict[str | None, list[str]]:
    """What the watchdog logs for the samples of this test, by their uid."""
    return {call.sample.uid: call.waits() for call in active_samples() if call.sample.data_source == "waiting"}
