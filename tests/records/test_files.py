"""The files of a records folder: their size is bounded, and a killed process leaves a folder that can be read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reward_loop import NaiveRewardLoopManager, RewardAgent, RewardLoopConfig, RewardSample
from reward_loop.records import Records, writer
from reward_loop.records.files import EVENTS, EXCHANGES, HEALTH, TEXTS, RecordFiles
from tests.records.rows import read, recorded
from tests.support.gsm8k import ROOT


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.jsonl"))


def names(folder: Path) -> list[str]:
    return sorted(path.name.split(".")[1] for path in folder.iterdir())


async def score(folder: Path, *samples: RewardSample, function: Any = len, **options: Any) -> list[dict[str, Any]]:
    config = RewardLoopConfig(log_dir=str(folder), **options)
    manager = NaiveRewardLoopManager(config, compute_score=lambda solution_str: function(solution_str))
    for sample in samples:
        await manager.run_single(sample)
    return await recorded(folder)


async def test_a_sample_is_recorded_with_its_texts(tmp_path: Path) -> None:
    sample = RewardSample(
        "four",
        "sums",
        "4",
        {"index": 7},
        uid="q7_1",
        group="q7",
        step=3,
        validate=True,
        response_length=2,
        prompt=[{"role": "user", "content": "2+2?"}],
    )
    (row,) = await score(tmp_path, sample)
    assert [row[name] for name in ("uid", "group", "step", "validate")] == ["q7_1", "q7", 3, True]
    assert [row[name] for name in ("version", "kind", "score", "reward", "masked")] == [1, "sample", 4, 4, False]
    assert row["response_length"] == 2
    assert row["total_s"] >= row["work_s"] >= 0
    assert (row["attempts"], row["calls"]) == (1, [])
    with (tmp_path / row["text_file"]).open("rb") as file:
        file.seek(row["text_offset"])
        text = json.loads(file.read(row["text_bytes"]))
    assert text == {
        "version": 1,
        "id": row["id"],
        "uid": "q7_1",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "response": "four",
        "ground_truth": "4",
        "extra_info": {"index": 7},
        "components": {},
    }
    assert row["exchange_file"] is None


async def test_large_components_are_among_the_texts(tmp_path: Path) -> None:
    large = {"explanation": "why " * 1000, "token_level_scores": [0.5] * 65}
    small = {"acc": True, "tags": ["a"], "note": "short"}
    config = RewardLoopConfig(log_dir=str(tmp_path))
    manager = NaiveRewardLoopManager(config, compute_score=lambda: {"score": 1.0, **large, **small})
    await manager.run_single(RewardSample("x"))
    (row,) = await recorded(tmp_path)
    assert {name: row["components"][name] for name in small} == small
    assert row["components"]["explanation"].startswith("why why")
    assert len(row["components"]["explanation"]) == 256
    assert row["components"]["token_level_scores"] is None
    (text,) = read(tmp_path / row["text_file"])
    assert text["components"] == large


class NoLength(list[int]):
    def __len__(self) -> int:
        raise RuntimeError("no length")


async def test_a_component_without_a_length_is_recorded(tmp_path: Path) -> None:
    config = RewardLoopConfig(log_dir=str(tmp_path))
    manager = NaiveRewardLoopManager(config, compute_score=lambda: {"score": 1.0, "odd": NoLength([1])})
    assert (await manager.run_single(RewardSample("x")))["reward_score"] == 1.0
    (row,) = await recorded(tmp_path)
    assert (row["score"], row["components"]["odd"]) == (1.0, [1])


async def test_a_share_of_groups_is_recorded_in_full_and_always_samples_without_a_score(tmp_path: Path) -> None:
    def fails(text: str) -> float | None:
        return None if text == "unscored" else 1 / (text != "failed")

    samples = [RewardSample("x", uid=f"{i}", group=f"g{i // 4}") for i in range(400)]
    samples += [RewardSample(text, uid=text) for text in ("failed", "unscored")]
    rows = await score(tmp_path, *samples, function=fails, record={"full": 0.25})
    full = [row["uid"] for row in rows if row["text_file"] is not None]
    assert len(rows) == 402
    assert full[-2:] == ["failed", "unscored"]
    groups = {int(uid) // 4 for uid in full[:-2]}
    assert [int(uid) for uid in full[:-2]] == [i for i in range(400) if i // 4 in groups]
    assert 10 <= len(groups) <= 40
    (none,) = await score(tmp_path / "none", samples[0], record={"full": 0.0})
    assert none["text_file"] is None


@pytest.mark.parametrize("fails", [False, True])
async def test_the_policy_and_the_processing_of_groups_are_recorded(tmp_path: Path, fails: bool) -> None:
    class Centred:
        def compute_score(self, solution_str: str) -> float | None:
            return float(solution_str) if solution_str else None

        def post_process_scores(self, scores: list[float]) -> list[float]:
            if fails:
                raise ValueError("no")
            return [value - sum(scores) / len(scores) for value in scores]

    options = RewardLoopConfig(log_dir=str(tmp_path), on_unscored="default", default_score=-9.0)
    async with RewardAgent(NaiveRewardLoopManager(options, compute_score=Centred)) as agent:
        await agent.submit([RewardSample(text, uid=f"q{text}") for text in ("1", "3", "")], group_size=3)
    rows = await recorded(tmp_path)
    assert {row["kind"] for row in rows} == {"sample"}
    found = {row["uid"]: (row["outcome"], row["score"], row["reward"]) for row in rows}
    if fails:
        scored = dict.fromkeys(("q1", "q3"), ("failed", None, None))
        assert all("sample q" in row["error"] for row in rows if row["outcome"] == "failed")
    else:
        scored = {"q1": ("scored", -1, -1), "q3": ("scored", 1, 1)}
        assert {row["uid"]: row["components"].get("raw_score") for row in rows} == {"q1": 1, "q3": 3, "q": None}
    assert found == {**scored, "q": ("unscored", None, -9.0)}
    assert len({row["group"] for row in rows}) == 1


def test_the_oldest_exchanges_are_deleted_first_and_rows_are_kept(tmp_path: Path) -> None:
    files = RecordFiles(tmp_path, max_bytes=128_000)  # a segment ends above 250 bytes
    for i in range(100):
        files.add_rows(b"r" * 99 + b"\n", 1)
        files.add_texts(EXCHANGES, b"e" * 1199 + b"\n")
        files.add_texts(TEXTS, b"t" * 1199 + b"\n")
        assert i % 20 or folder_size(tmp_path) <= 128_000 + 2 * 1200 + 100, i
    assert files.path.stat().st_size == 10_000
    texts, exchanges = names(tmp_path / TEXTS), names(tmp_path / EXCHANGES)
    # 118,000 bytes are left for texts: half of them for exchanges, the rest for the texts of samples.
    assert exchanges == [f"{i:06}" for i in range(100 - len(exchanges), 100)]
    assert texts == [f"{i:06}" for i in range(100 - len(texts), 100)]
    assert 44 <= len(exchanges) <= 49
    assert 44 <= len(texts) <= 49


@pytest.mark.parametrize("kind", [EVENTS, HEALTH])
def test_rows_in_sub_folders_count_towards_the_size(tmp_path: Path, kind: str) -> None:
    (tmp_path / kind).mkdir()
    (tmp_path / kind / "host-1-a.jsonl").write_bytes(b"r" * 100_000)
    files = RecordFiles(tmp_path, max_bytes=128_000)
    for _ in range(75):
        files.add_texts(TEXTS, b"t" * 1199 + b"\n")
    assert folder_size(tmp_path) <= 128_000 + 1200
    assert (tmp_path / kind / "host-1-a.jsonl").stat().st_size == 100_000
    assert len(names(tmp_path / TEXTS)) > 20


def test_processes_share_the_size_of_a_folder(tmp_path: Path) -> None:
    one, other = (RecordFiles(tmp_path, max_bytes=128_000) for _ in range(2))
    for _ in range(75):
        one.add_texts(TEXTS, b"1" * 1199 + b"\n")
    for _ in range(75):
        other.add_texts(TEXTS, b"2" * 1199 + b"\n")
    assert folder_size(tmp_path) <= 128_000 + 1200
    assert {path.read_bytes()[:1] for path in (tmp_path / TEXTS).iterdir()} == {b"1", b"2"}


@pytest.mark.parametrize("sub_folder", [TEXTS, EVENTS, None])
def test_what_cannot_be_written_costs_nothing_else_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sub_folder: str | None
) -> None:
    found = Records(tmp_path)
    path = found.path
    if sub_folder is None:
        found.files.path = Path("/dev/full")
    else:
        (tmp_path / sub_folder).write_text("a file where the folder should be")
    for uid in "abc":
        found.write({"uid": uid}, {"response": "x"})
        found.write_phase("gen", 1, 0.0, 1.0)
        assert found.flush()
    lost = [record.message for record in caplog.records if "records of samples are lost" in record.message]
    assert len(lost) == 1
    if sub_folder is None:
        assert "cannot write /dev/full: [Errno 28] No space left on device" in lost[0]
        found.files.path = path
        found.write({"uid": "kept"})
        assert found.flush()
        assert "records are written again: 3 were lost" in caplog.text
    assert [row["uid"] for row in read(path)] == (["kept"] if sub_folder is None else list("abc"))


@pytest.mark.parametrize(
    ("text", "exchanges", "kept"),
    [
        ({"extra_info": {"tests": ["x" * 35] * 100}}, (), 2),
        ({"extra_info": np.array([{"pixels": np.zeros(3500, np.uint8)}], object)}, (), 1),
        ({}, [{"request": {"prompt": "x" * 3500}}], 2),
    ],
)
def test_records_that_cannot_be_written_in_time_are_dropped(
    text: Any,
    exchanges: Any,
    kept: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(writer, "MAX_WAITING", 10_000)
    hangs, begun = threading.Event(), threading.Event()
    found = Records(tmp_path)
    write = found.files.add_rows

    def slow(lines: bytes, count: int) -> None:
        begun.set()
        assert hangs.wait(60)
        write(lines, count)

    monkeypatch.setattr(found.files, "add_rows", slow)
    found.write({"uid": "first"})
    assert begun.wait(60)
    for i in range(200):
        found.write({"uid": i}, text and dict(text), exchanges)
    hangs.set()
    assert found.flush(60)
    found.write({"uid": "last"})
    assert found.flush(60)
    assert [row["uid"] for row in read(found.path)] == ["first", *range(kept), "last"]
    assert sum("cannot be written fast enough" in record.message for record in caplog.records) == 1
    assert f"records are written again: {200 - kept} were lost" in caplog.text


@pytest.mark.integration
def test_a_killed_process_loses_its_last_moment_at_most(tmp_path: Path) -> None:
    code = f"""
import itertools, sys
from reward_loop.records import records
for i in itertools.count():
    records({str(tmp_path)!r}).write({{"version": 1, "kind": "sample", "uid": str(i)}}, {{"response": "x" * 500}})
    if i % 100 == 0:
        records({str(tmp_path)!r}).flush()
        print(i, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    flushed = 0
    while flushed < 3000:
        flushed = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (path,) = tmp_path.glob("*.jsonl")
    *lines, _ = path.read_bytes().split(b"\n")
    rows = [json.loads(line) for line in lines]
    assert [row["uid"] for row in rows] == [str(i) for i in range(len(rows))]
    assert len(rows) > 3000
    for row in rows[::100]:
        with (tmp_path / row["text_file"]).open("rb") as file:
            file.seek(row["text_offset"])
            assert json.loads(file.read(row["text_bytes"]))["id"] == row["id"]
