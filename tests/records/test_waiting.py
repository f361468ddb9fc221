from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from reward_loop import NaiveRewardLoopManager, RewardLoopManagerBase, RewardSample, TransientError, limit
from reward_loop.cli import app
from reward_loop.managers import BatchRewardLoopManager, GroupRewardLoopManager
from reward_loop.records import active_samples
from tests.clock import until


def waits() -> dict[str | None, list[str]]:
    """What the samples of this test wait for, by their uid."""
    return {call.sample.uid: list(call.asking) for call in active_samples() if call.sample.data_source == "waiting"}


async def awaits(solution_str: str) -> float:
    async with limit("judge"):
        await asyncio.Event().wait()
    return 1.0


def in_a_process(solution_str: str) -> float:
    import threading

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
        (in_a_process, "judge", {"isolation": "process", "max_processes": 2}),
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
        shown = await asyncio.to_thread(
            CliRunner().invoke, app, ["stuck", str(os.getpid()), "--timeout", "60"], env={"COLUMNS": "240"}
        )
        assert f"limit {name!r}" in shown.output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.to_thread(manager.close)
    assert waits() == {}


async def test_waiting_for_a_limit_in_a_thread_is_shown() -> None:
    go = threading.Event()

    def in_a_thread(solution_str: str) -> float:
        with limit("judge"):
            go.wait()
        return 1.0

    manager = NaiveRewardLoopManager({"limits": {"judge": {"max_concurrent": 1}}}, compute_score=in_a_thread)
    samples = [RewardSample("x", uid=f"q{i}", data_source="waiting") for i in range(2)]
    tasks = [asyncio.create_task(manager.run_single(sample)) for sample in samples]
    try:
        await until(lambda: sorted(waits().values()) == [[], ["limit 'judge'"]])
    finally:
        go.set()
        await asyncio.wait(tasks)
    assert waits() == {}


async def test_waiting_for_the_next_attempt_is_shown() -> None:
    async def busy(solution_str: str) -> float:
        raise TransientError("busy", retry_after=600)

    manager = NaiveRewardLoopManager({"retry": {"max_seconds": 3600}}, compute_score=busy)
    task = asyncio.create_task(manager.run_single(RewardSample("q0", uid="q0", data_source="waiting")))
    await until(lambda: waits() == {"q0": ["the pause before the next attempt"]})
    task.cancel()
    await asyncio.wait([task])


def blocks(solution_str: str) -> float:
    gates[solution_str].wait(60)
    return 1.0


gates = {f"q{i}": threading.Event() for i in range(2)}


async def test_waiting_for_a_free_thread_is_shown() -> None:
    manager = NaiveRewardLoopManager({"max_threads": 1}, compute_score=blocks)
    samples = [RewardSample(uid, uid=uid, data_source="waiting") for uid in gates]
    tasks = [asyncio.create_task(manager.run_single(sample)) for sample in samples]
    try:
        await until(lambda: described() == {"q0": [], "q1": ["a free thread"]})
        gates["q0"].set()
        await until(lambda: described() == {"q1": []})
    finally:
        for gate in gates.values():
            gate.set()
        await asyncio.wait(tasks)


async def test_waiting_for_a_free_process_is_shown() -> None:
    config = {"limits": {"judge": {"max_concurrent": 1}}, "isolation": "process", "max_processes": 1}
    manager = NaiveRewardLoopManager(config, compute_score=in_a_process)
    samples = [RewardSample("x", uid=f"q{i}", data_source="waiting") for i in range(2)]
    tasks = [asyncio.create_task(manager.run_single(sample)) for sample in samples]
    try:
        await until(lambda: sorted(described().values()) == [[], ["a free process"]])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.to_thread(manager.close)


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
    """What `reward-loop stuck` shows for the samples of this test, by their uid."""
    return {call.sample.uid: call.waits() for call in active_samples() if call.sample.data_source == "waiting"}
