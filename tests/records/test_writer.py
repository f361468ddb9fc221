from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reward_loop import (
    NaiveRewardLoopManager,
    RewardAgent,
    RewardLoopConfig,
    RewardSample,
    RewardTimeoutError,
    ScoringFunction,
    TransientError,
    limit,
)
from reward_loop.client import Judge, Number
from reward_loop.managers import GroupRewardLoopManager
from reward_loop.records import Records, active, records
from reward_loop.records.writer import _MAX_DURATIONS, ExchangeCounts
from reward_loop.testing import FakeJudge
from tests.clock import until
from tests.gsm8k import ROOT


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_every_sample_has_a_record(tmp_path: Path) -> None:
    judge = Judge("{{answer}}", Number(0, 1))

    async def compute_score(solution_str: str, reward_router_address: str) -> Any:
        if solution_str == "raise":
            raise RuntimeError("no")
        if solution_str == "judge":
            return (await judge(reward_router_address, answer=solution_str)).reward(length=5)
        return {"score": 0.5, "array": np.ones(2)} if solution_str == "dict" else None

    async with FakeJudge("Score: 1") as server:
        manager = NaiveRewardLoopManager(
            RewardLoopConfig(log_dir=str(tmp_path / "logs")),
            compute_score=compute_score,
            reward_router_address=server.address,
        )
        texts = ["dict", "judge", "raise", "none"]
        for i, text in enumerate(texts):
            await manager.run_single(RewardSample(text, uid=f"q{i}", data_source="gsm8k"))
    writer = records(tmp_path / "logs")
    assert await asyncio.to_thread(writer.flush)
    (path,) = (tmp_path / "logs").glob("*.jsonl")
    assert path == writer.path
    assert f"-{os.getpid()}-" in path.name
    plain, judged, failed, unscored = read(path)
    assert [plain["uid"], plain["data_source"], plain["outcome"], plain["score"]] == ["q0", "gsm8k", "scored", 0.5]
    assert plain["components"] == {"score": 0.5, "array": [1.0, 1.0]}
    assert judged["components"]["length"] == 5
    assert judged["judges"][0]["verdict"] == 1.0
    assert judged["completion_tokens"] == 2
    assert judged["work_s"] >= judged["judges"][0]["seconds"] > 0
    assert min(judged["queue_s"], judged["wait_s"]) >= 0
    assert (failed["outcome"], failed["score"]) == ("failed", None)
    assert "sample q2" in failed["error"]
    assert (unscored["outcome"], unscored["error"]) == ("unscored", None)
    assert all(set(row) == set(plain) for row in (judged, failed, unscored))

    import pandas

    frame = pandas.read_json(path, lines=True)
    assert frame.groupby("outcome").size().to_dict() == {"scored": 2, "failed": 1, "unscored": 1}
    assert frame["score"].mean() == 0.75


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
    assert await asyncio.to_thread(records(tmp_path).flush)
    rows = {row["uid"]: row for row in read(records(tmp_path).path)}
    assert [rows[name]["attempts"] for name in "abc"] == [2, 1, 1]
    # `a` paused before its second attempt; `b` had the only thread, and waited for the place; `c` waited for `b`.
    assert rows["a"]["wait_s"] >= 0.2
    assert rows["b"]["wait_s"] + rows["b"]["queue_s"] >= 0.4
    for row in rows.values():
        assert row["work_s"] >= 0.1
        assert row["work_s"] + row["wait_s"] + row["queue_s"] >= 0.5
    assert rewards[2]["reward_queue_seconds"] >= 0.4
    for info, name in zip(rewards, "abc", strict=True):
        assert info["reward_queue_seconds"] <= rows[name]["queue_s"] + 0.001


def test_values_that_json_cannot_represent_are_written_as_text(tmp_path: Path) -> None:
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    holds_itself: list[Any] = []
    holds_itself.append(holds_itself)
    writer = Records(tmp_path)
    writer.write({"uid": "a", "score": float("nan"), "text": "\ud800", "big": 10**30, "set": {1}, (1, 2): b"x"})
    writer.write({"uid": "b", "components": Odd()})
    writer.write({"uid": "c", "components": holds_itself})
    assert writer.flush()
    first, odd, loop = read(writer.path)
    assert (first["score"], first["text"], first["big"]) == (None, "\\ud800", 10**30)
    assert odd["uid"] == "b"
    assert "no text" in odd["record_error"]
    assert "RecursionError" in loop["record_error"]


def test_a_full_disk_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    writer = Records(tmp_path)
    path = writer.path
    with caplog.at_level(logging.WARNING):
        writer._files.path = full
        for _ in range(3):
            writer.write({"uid": "lost"})
            assert writer.flush()
        writer._files.path = path
        writer.write({"uid": "kept"})
        assert writer.flush()
    assert [record.message for record in caplog.records if "records of samples are lost" in record.message] == [
        "records of samples are lost: cannot write /dev/full: [Errno 28] No space left on device"
    ]
    assert [row["uid"] for row in read(path)] == ["kept"]


def test_a_directory_has_one_writer(tmp_path: Path) -> None:
    assert records(tmp_path) is records(str(tmp_path) + "/")
    assert records(tmp_path) is not records(tmp_path / "other")


def test_the_exit_of_the_process_waits_for_the_records(tmp_path: Path) -> None:
    code = f"""
from reward_loop.records import records
for i in range(5000):
    records({str(tmp_path)!r}).write({{"uid": i}})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)
    (path,) = tmp_path.iterdir()
    assert [row["uid"] for row in read(path)] == list(range(5000))


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


@pytest.mark.parametrize(
    ("function", "isolation"), [(costs, "thread"), (costs_in_a_thread, "thread"), (costs_in_a_thread, "process")]
)
async def test_the_cost_that_a_function_reports_is_in_its_row(tmp_path: Path, function: Any, isolation: str) -> None:
    config = RewardLoopConfig(log_dir=str(tmp_path), isolation=isolation, limits={"judge": {"max_concurrent": 1}})
    manager = NaiveRewardLoopManager(config, compute_score=function)
    await asyncio.gather(*(manager.run_single(RewardSample("x", uid=f"q{i}")) for i in range(3)))
    assert await asyncio.to_thread(records(tmp_path).flush)
    assert [row["cost"] for row in read(records(tmp_path).path)] == [0.25] * 3
    manager.close()


async def test_the_cost_of_a_call_for_several_samples_is_shared(tmp_path: Path) -> None:
    async def both(solution_strs: list[str]) -> list[float]:
        await costs("x")
        return [1.0 for _ in solution_strs]

    config = RewardLoopConfig(log_dir=str(tmp_path), limits={"judge": {"max_concurrent": 1}})
    manager = GroupRewardLoopManager(config, compute_score=both)
    samples = [RewardSample("x", uid=f"q{i}", group="g", group_size=2) for i in range(2)]
    await asyncio.gather(*map(manager.run_single, samples))
    assert await asyncio.to_thread(records(tmp_path).flush)
    assert [row["cost"] for row in read(records(tmp_path).path)] == [0.125, 0.125]


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
    assert await asyncio.to_thread(records(tmp_path).flush)
    assert await asyncio.to_thread(records(tmp_path / "alone").flush)
    each = read(records(tmp_path / "alone").path)
    tokens = [sum(row[name] for row in each) for name in ("prompt_tokens", "completion_tokens")]
    return read(records(tmp_path).path), *tokens


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
    await asyncio.sleep(0.5)
    await manager.run_single(samples[1])
    await early
    assert await asyncio.to_thread(records(tmp_path).flush)
    rows = {row["uid"]: row for row in read(records(tmp_path).path)}
    assert rows["early"]["batch_s"] >= 0.5
    assert rows["early"]["queue_s"] == rows["late"]["queue_s"]


async def test_the_queue_of_a_call_past_its_deadline_is_measured() -> None:
    # Both calls share the only thread; the second starts when the first has passed its deadline.
    release = threading.Event()
    scoring = ScoringFunction(lambda: release.wait(60), max_threads=1, timeout=0.5)
    results = await asyncio.gather(*(scoring(RewardSample("x")) for _ in range(2)))
    release.set()
    assert [type(result.exception) for result in results] == [RewardTimeoutError] * 2
    assert results[0].queue_seconds < results[1].queue_seconds
    assert results[1].queue_seconds >= 0.5


async def test_a_sample_that_fails_after_its_function_returned_has_a_second_record(tmp_path: Path) -> None:
    class Function:
        def compute_score(self, solution_str: str) -> float | None:
            return float(solution_str) if solution_str else None

        def post_process_scores(self, scores: list[float]) -> list[float]:
            raise ValueError("no")

    manager = NaiveRewardLoopManager({"log_dir": str(tmp_path)}, compute_score=Function)
    async with RewardAgent(manager) as agent:
        await agent.submit([RewardSample(text, uid=f"q{text}") for text in ("1", "2", "")], group_size=3)
    writer = records(tmp_path)
    assert await asyncio.to_thread(writer.flush)
    lines = read(writer.path)
    assert [line["outcome"] for line in lines if line["uid"] == "q"] == ["unscored"]
    for uid in ("q1", "q2"):
        first, second = (line for line in lines if line["uid"] == uid)
        assert (first["outcome"], first["attempts"]) == ("scored", 1)
        assert (first["kind"], second["kind"]) == ("sample", "revision")
        assert (second["outcome"], second["score"], second["attempts"], second["work_s"]) == ("failed", None, 0, 0.0)
        assert f"sample {uid}: post_process_scores" in second["error"]


def test_exchanges_are_counted_until_they_are_taken() -> None:
    counts = ExchangeCounts()
    counts.add([{"seconds": 1.0}, {"seconds": 2.0, "unscored": "no 'Score:'"}])
    counts.add([{"seconds": None, "error": "late"}])
    assert counts.take() == {"calls": 3, "without_verdict": 1, "seconds": [1.0, 2.0, 0.0]}
    assert counts.take() == {"calls": 0, "without_verdict": 0, "seconds": []}


def test_the_kept_durations_are_bounded() -> None:
    counts = ExchangeCounts()
    for number in range(_MAX_DURATIONS + 10):
        counts.add([{"seconds": float(number)}])
    taken = counts.take()
    assert (taken["calls"], len(taken["seconds"]), taken["seconds"][0]) == (_MAX_DURATIONS + 10, _MAX_DURATIONS, 10.0)


def test_the_writer_counts_exchanges_of_training_samples(tmp_path: Path) -> None:
    writer = Records(tmp_path)
    writer.write({"kind": "sample", "validate": False}, None, [{"id": "a", "seconds": 1.0}])
    writer.write({"kind": "sample", "validate": True}, None, [{"id": "b", "seconds": 5.0}])
    assert writer.exchange_counts.take()["seconds"] == [1.0]
    assert writer.flush()
