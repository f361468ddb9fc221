"""Records can be read by DuckDB and pandas as docs/records.md shows, and by the reader while they are written."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample
from reward_loop.client import Judge, Number
from reward_loop.records import records
from reward_loop.records.reader import RecordsReader
from reward_loop.testing import FakeJudge
from tests.support.gsm8k import ROOT

JUDGE = Judge("{{answer}}", Number(0, 1))


async def compute_score(solution_str: str, reward_router_address: str) -> Any:
    """Return values of all kinds: their keys and types differ between rows."""
    match solution_str:
        case "judge":
            return (await JUDGE(reward_router_address, answer=solution_str)).reward()
        case "surrogate":
            return {"score": 1.0, "text": "half \ud83d", "other": 10.5}
        case "raise":
            raise RuntimeError("<script>alert(1)</script> \x1b[31m")
        case "none":
            return None
    return {"score": 0.5, "other": "text", "array": np.ones(1)}


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """The records of five samples."""
    path = tmp_path / "rewards"
    async with FakeJudge("Score: 1") as server:
        manager = NaiveRewardLoopManager(
            RewardLoopConfig(log_dir=str(path)), compute_score=compute_score, reward_router_address=server.address
        )
        for text in ("judge", "surrogate", "raise", "none", "x"):
            await manager.run_single(RewardSample(text, uid=text, ground_truth="\ud800"))
    assert await asyncio.to_thread(records(path).flush)
    return path


@pytest.mark.integration
def test_the_lines_of_the_page_read_a_folder(folder: Path) -> None:
    pytest.importorskip("duckdb")
    pytest.importorskip("pandas")
    (code,) = re.findall(r"```python\n(# read_records.*?)```", (ROOT / "docs/records.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"scored .* 3 .* 0.83", done.stdout), done.stdout
    assert "[5 rows x" in done.stdout


def test_the_reader_finds_the_texts_of_each_row(folder: Path) -> None:
    reader = RecordsReader(folder)
    rows = {row["uid"]: row for row in reader.rows()}
    assert [(row["outcome"], row["score"]) for row in rows.values()] == [
        ("scored", 1.0),
        ("scored", 1.0),
        ("failed", None),
        ("unscored", None),
        ("scored", 0.5),
    ]
    assert len({frozenset(row) for row in rows.values()}) == 1  # all have the same fields
    assert (rows["x"]["components"], rows["none"]["error"]) == ({"score": 0.5, "other": "text", "array": [1.0]}, None)
    for uid, row in rows.items():
        text = reader.text(row)
        assert text is not None
        assert (text["response"], text["ground_truth"]) == (uid, "\\ud800")
        assert len(reader.exchanges(row)) == (uid == "judge")
    (exchange,) = reader.exchanges(rows["judge"])
    assert (exchange["reply"], exchange["verdict"]) == ("Score: 1", 1.0)
