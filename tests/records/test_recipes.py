"""The recipes of docs/records.md, on records that the library has written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import duckdb
import pytest

from reward_loop.records import Records
from tests.support.gsm8k import ROOT
from tests.support.recorded import flushed, record


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, scores in (("rewards", [1.0, 0.0, 0.5]), ("other", [1.0, 0.5, None])):
        writer = Records(tmp_path / name)
        for number, score in enumerate(scores):
            record(writer, f"s{number}", score, step=2 + number, response=f"answer {number}")
        writer.write_advantages(3, {"s1": 0.5})
        flushed(writer)
    return tmp_path


def test_two_scorings_are_joined_and_rollouts_exported(folder: Path) -> None:
    join, export = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "records.md").read_text(), re.DOTALL)
    (found,) = duckdb.sql(join).fetchall()
    assert found == (3, pytest.approx(0.5), pytest.approx(0.75), pytest.approx(1.0), 0.5, 1)
    duckdb.sql(export)
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert {(line["step"], line["uid"], line["response"]) for line in lines} == {
        (3, "s1", "answer 1"),
        (4, "s2", "answer 2"),
    }
