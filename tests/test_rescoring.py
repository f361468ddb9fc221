"""Scoring the rollouts of a run again, from its records."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample, cli
from reward_loop.records import records
from reward_loop.records.reader import RecordsReader

STRICT = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert extra_info["index"] >= 0 or data_source == "dump"
    return float(solution_str == ground_truth)

def plain(solution_str, ground_truth):
    return float(solution_str == ground_truth)
"""


def run(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, list(args))
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The records of six samples, which a generous function has scored, in ``run``; the working directory."""
    (tmp_path / "strict.py").write_text(STRICT)
    manager = NaiveRewardLoopManager(
        RewardLoopConfig(log_dir=str(tmp_path / "run"), record={"full": 0.999}), compute_score=lambda solution_str: 1.0
    )
    samples = [
        RewardSample(
            f"{i}",
            "sums",
            f"{i - i % 2}",
            {"index": i},
            uid=f"q{i // 2}_{i % 2}",
            group=f"q{i // 2}",
            step=i // 2,
            prompt=f"{i}=?",
        )
        for i in range(6)
    ]

    async def score() -> None:
        for sample in samples:
            await manager.run_single(sample)

    asyncio.run(score())
    assert records(tmp_path / "run").flush()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_records_are_scored_as_they_are(folder: Path) -> None:
    shown = run("score", "strict.py", "run", "-o", "again", "--export", "scores.jsonl")
    assert "rows: 6" in shown
    assert "in the browser: reward-loop view again" in shown
    rows = read(folder / "scores.jsonl")
    assert [row["score"] for row in rows] == [1.0, 0.0] * 3
    assert [row["input_score"] for row in rows] == [1.0] * 6
    assert [row["step"] for row in rows] == [0, 0, 1, 1, 2, 2]
    assert rows[3]["prompt"] == "3=?"
    (path,) = (folder / "again").glob("*.jsonl")
    found = {row["uid"]: row for row in read(path)}
    assert [(row["group"], row["step"], row["score"]) for _, row in sorted(found.items())] == [
        ("q0", 0, 1.0),
        ("q0", 0, 0.0),
        ("q1", 1, 1.0),
        ("q1", 1, 0.0),
        ("q2", 2, 1.0),
        ("q2", 2, 0.0),
    ]
    texts = {text["uid"]: text for text in read(folder / "again" / "texts" / f"{path.stem}.000000.jsonl")}
    assert (texts["q1_1"]["prompt"], texts["q1_1"]["extra_info"]) == ("3=?", {"index": 3})
    assert "3 groups: 0 with equal rewards" in run("report", "again")


def test_records_without_texts_are_failed_rows(folder: Path) -> None:
    for path in (folder / "run" / "texts").iterdir():
        path.unlink()
    shown = run("score", "strict.py", "run", code=2)
    assert "none of the 6 rows can be scored. q0_0: its texts were not recorded, or have been deleted" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-o", "run"], "--output run is in the folder that is scored"),
        (["run", "-o", "run/out"], "--output run/out is in the folder that is scored"),
        (["run", "--export", "run/out.jsonl"], "name a JSONL file, .jsonl, that is not the input, nor in it"),
        ([".", "-o", "x"], ". contains no records"),
    ],
)
def test_an_output_in_the_folder_that_is_read_is_an_error(folder: Path, arguments: list[str], message: str) -> None:
    assert message in run("score", "strict.py", *arguments, code=2)
    assert len(list((folder / "run").glob("*.jsonl"))) == 1


def test_the_output_of_a_folder_that_is_the_current_one_is_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "run")
    run("score", "../strict.py", ".")
    assert list((folder / "run.scored").glob("*.jsonl"))


def test_what_was_recorded_comes_back_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big, code = 2**64 + 1, b"\x00\xff byte"
    (tmp_path / "exact.py").write_text(
        "def compute_score(ground_truth, extra_info):\n"
        f"    assert ground_truth == {big} and type(ground_truth) is int\n"
        f"    assert extra_info == {{'code': {code!r}, 'nested': [{{'code': b''}}], 'pair': [1, 2], 'nan': None}}\n"
        "    return {'score': 1.0, 'seed': ground_truth, 'code': b'x'}\n"
    )
    manager = NaiveRewardLoopManager(
        RewardLoopConfig(log_dir=str(tmp_path / "run.parquet")),
        compute_score=lambda ground_truth: {"score": 1, "seed": big},
    )
    info = {"code": code, "nested": [{"code": b""}], "pair": (1, 2), "nan": float("nan")}
    asyncio.run(manager.run_single(RewardSample("x", "d", big, info, uid="a")))
    records(tmp_path / "run.parquet").flush()  # a folder may have any name
    monkeypatch.chdir(tmp_path)
    run("score", "exact.py:compute_score", "run.parquet", "-o", "again", "--export", "out.jsonl")
    for folder in ("run.parquet", "again"):
        (row,) = RecordsReader(tmp_path / folder).rows()
        assert (row["score"], row["components"]["seed"]) == (1.0, big)
    (exported,) = read(tmp_path / "out.jsonl")
    assert exported["ground_truth"] == big
    assert exported["components"] == {"score": 1.0, "seed": big, "code": {"$bytes": "eA=="}}
