from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from reward_loop import (
    NaiveRewardLoopManager,
    RewardLoopConfig,
    RewardSample,
    TransientError,
    limit,
)
from reward_loop.client import Judge, Number
from reward_loop.managers import GroupRewardLoopManager
from reward_loop.records import Records, active
from reward_loop.records.writer import _MAX_DURATIONS
from reward_loop.testing import FakeJudge
from tests.records.rows import read, recorded
from tests.support.clock import until
from tests.support.gsm8k import ROOT


@pytest.mark.processes  # waits for a second, with threads
async def test_waiting_and_running_are_measured_separately(tmp_path: Path) -> None:
    tried: list[str] = []

    def compute_score(solution_str: str) -> float:
        tried.append(solution_str)
        if len(tried) == 1:
            raise TransientError("busy", retry_after=0.2)
        with limit("judge"):
            time.sleep(0.1)
        return 1.0

    config = RewardLoopConfig(log_dir=str(tmp_path), max_threads=1, limits={"judge": {"max_concurrent": 1}})
    manager = NaiveRewardLoopManager(config, compute_score=compute_score)
    place = await manager.limits.acquire("judge", 0, "train")
    calls = [asyncio.create_task(manager.run_single(RewardSample(text, uid=text))) for text in "abc"]
    await until(lambda: {"a", "b"} <= set(tried))
    await asyncio.sleep(0.8)
    place.leave()
    rewards = [reward["reward_extra_info"] for reward in await asyncio.gather(*calls)]
    rows = {row["uid"]: row for row in await recorded(tmp_path)}
    assert [rows[name]["attempts"] for name in "abc"] == [2, 1, 1]
    # `a` paused before its second attempt; `b` had the only thread, and waited for the place; `c` waited for `b`.
    assert rows["a"]["wait_s"] >= 0.2
    assert rows["b"]["wait_s"] + rows["b"]["queue_s"] >= 0.4
    for row in rows.values():
        assert row["work_s"] >= 0.1
        assert row["work_s"] + row["wait_s"] + row["queue_s"] >= 0.5
    assert rewards[2]["reward_queue_s"] >= 0.4
    for info, name in zip(rewards, "abc", strict=True):
        assert info["reward_queue_s"] <= rows[name]["queue_s"] + 0.001


def test_the_exit_of_the_process_waits_for_the_records(tmp_path: Path) -> None:
    code = f"""
from reward_loop.records import records
for i in range(5000):
    records({str(tmp_path)!r}).write({{"uid": i}})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)
    (path,) = tmp_path.iterdir()
    assert [row["uid"] for row in read(path)] == list(range(5000))


NO_THREADS = """
import asyncio, sys, threading
from reward_loop import NaiveRewardLoopManager, RewardSample

def refuse(thread):
    raise RuntimeError("can't start new thread")

async def compute_score(solution_str):
    return 1.0

async def main():
    manager = NaiveRewardLoopManager({"log_dir": sys.argv[1]}, compute_score=compute_score)
    start, threading.Thread.start = threading.Thread.start, refuse
    await manager.run_single(RewardSample("a", uid="a"))
    assert not manager.records.flush(60)
    threading.Thread.start = start
    await manager.run_single(RewardSample("b", uid="b"))
    assert manager.records.flush(60)

asyncio.run(main())
"""


@pytest.mark.processes
def test_without_further_threads_samples_are_scored_and_recorded_later(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NO_THREADS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=120, check=True)
    (path,) = tmp_path.glob("*.jsonl")
    assert [row["uid"] for row in read(path)] == ["a", "b"]
    assert done.stderr.count("can't start new thread") == 2  # of the records, and of the watchdog


def test_a_write_that_stops_midway_leaves_no_torn_line(tmp_path: Path) -> None:
    code = f"""
import resource
from reward_loop.records import records
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for i in range(50):
    records({str(tmp_path)!r}).write({{"uid": i, "text": "x" * 100}})
    records({str(tmp_path)!r}).flush()
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT, capture_output=True)
    (path,) = tmp_path.iterdir()
    assert [row["uid"] for row in read(path)] == list(range(len(read(path))))
    assert 1 < len(read(path)) < 8
    assert done.stderr.count(b"File too large") == 1


async def costs(solution_str: str) -> float:
    async with limit("judge") as lease:
        lease.used(cost=1.0)
        lease.used(cost=0.25)  # replaces the value before
    return 1.0


def costs_in_a_thread(solution_str: str) -> float:
    with limit("judge") as lease:
        lease.used(cost=0.25)
    return 1.0


@pytest.mark.parametrize("function", [costs, costs_in_a_thread])
async def test_the_cost_that_a_function_reports_is_in_its_row(tmp_path: Path, function: Any) -> None:
    config = RewardLoopConfig(log_dir=str(tmp_path), limits={"judge": {"max_concurrent": 1}})
    manager = NaiveRewardLoopManager(config, compute_score=function)
    await asyncio.gather(*(manager.run_single(RewardSample("x", uid=f"q{i}")) for i in range(3)))
    assert [row["cost"] for row in await recorded(tmp_path)] == [0.25] * 3
    manager.close()


async def grade_all(solution_strs: list[str], reward_router_address: str) -> list[float | None]:
    judge = Judge("{{answer}}", Number(0, 1))
    return [(await judge(reward_router_address, answer=text)).score for text in solution_strs]


async def records_of_a_group(tmp_path: Path, count: int) -> tuple[list[dict[str, Any]], int, int]:
    """Score a group with a judge; return its records, and the tokens that the server counted."""
    async with FakeJudge("Score: 1") as server:
        manager = GroupRewardLoopManager(
            RewardLoopConfig(log_dir=str(tmp_path)), compute_score=grade_all, reward_router_address=server.address
        )
        samples = [RewardSample("a word " * i, uid=f"q{i}", group="g", group_size=count) for i in range(count)]
        alone = NaiveRewardLoopManager(
            RewardLoopConfig(log_dir=str(tmp_path / "alone")),
            compute_score=one_by_one,
            reward_router_address=server.address,
        )
        await asyncio.gather(*map(manager.run_single, samples))
        await asyncio.gather(*map(alone.run_single, samples))
    each = await recorded(tmp_path / "alone")
    tokens = [sum(row[name] for row in each) for name in ("prompt_tokens", "completion_tokens")]
    return await recorded(tmp_path), *tokens


async def one_by_one(solution_str: str, reward_router_address: str) -> float | None:
    return (await grade_all([solution_str], reward_router_address))[0]


async def test_tokens_and_exchanges_of_a_call_for_several_samples_are_shared(tmp_path: Path) -> None:
    rows, prompt_tokens, completion_tokens = await records_of_a_group(tmp_path, 3)
    shares = [row["prompt_tokens"] for row in rows]
    assert sum(shares) == prompt_tokens > 0
    assert max(shares) - min(shares) <= 1
    assert sum(row["completion_tokens"] for row in rows) == completion_tokens > 0
    assert [len(row["judges"]) for row in rows] == [3, 3, 3]
    assert len({row["batch"] for row in rows} - {None}) == 1


async def test_a_large_call_writes_its_exchanges_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "MAX_COPIES", 8)
    rows, _, _ = await records_of_a_group(tmp_path, 3)
    assert sorted(len(row["judges"]) for row in rows) == [0, 0, 3]
    assert len({row["batch"] for row in rows}) == 1


async def test_the_wait_for_a_group_is_not_a_wait_for_a_thread(tmp_path: Path) -> None:
    manager = GroupRewardLoopManager(
        RewardLoopConfig(log_dir=str(tmp_path)), compute_score=lambda solution_strs: [1.0] * len(solution_strs)
    )
    samples = [RewardSample("x", uid=uid, group="g", group_size=2) for uid in ("early", "late")]
    early = asyncio.create_task(manager.run_single(samples[0]))
    await asyncio.sleep(0.1)
    await manager.run_single(samples[1])
    await early
    rows = {row["uid"]: row for row in await recorded(tmp_path)}
    assert rows["early"]["batch_s"] >= 0.1
    assert rows["early"]["queue_s"] == rows["late"]["queue_s"]


def test_exchanges_of_training_samples_are_counted_until_the_counts_are_taken(tmp_path: Path) -> None:
    writer = Records(tmp_path)
    writer.write({"kind": "sample", "validate": True}, None, [{"id": "v", "seconds": 5.0}])
    unscored = {"id": "b", "seconds": 2.0, "unscored": "no 'Score:'"}
    writer.write({"kind": "sample", "validate": False}, None, [{"id": "a", "seconds": None, "error": "late"}, unscored])
    assert writer.exchange_counts.take() == {"calls": 2, "without_verdict": 1, "seconds": [0.0, 2.0]}
    for number in range(_MAX_DURATIONS + 10):
        writer.exchange_counts.add([{"seconds": float(number)}])
    taken = writer.exchange_counts.take()  # the newest durations are kept
    assert (taken["calls"], len(taken["seconds"]), taken["seconds"][0]) == (_MAX_DURATIONS + 10, _MAX_DURATIONS, 10.0)
    assert writer.flush()
