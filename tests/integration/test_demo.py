"""The demo, end to end: models, verl, the served reward model, the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.arithmetic.demo import QUICK, RECORDS
from reward_loop.records.reader import RecordsReader
from reward_loop.view.phases import phases

ROOT = Path(__file__).parents[2]
STEPS = 2


@pytest.mark.integration
def test_quick_demo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.arithmetic.demo", "--quick", f"--steps={STEPS}", "--output", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout
    assert "Exact match on held-out problems" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    # Two steps are too few for a certain gain; the whole demo shows the learning.
    assert 0 < report["accuracy_before"] < 1
    assert 0 < report["accuracy_after"] < 1
    assert report["rewards"] == {"scored": STEPS * QUICK.prompts * QUICK.answers, "unscored": 0, "failed": 0}
    assert len(report["steps"]) == STEPS
    assert sum(report["seconds_by_phase"].values()) > 0
    assert 0 <= report["overlap"]["hidden_share"] <= 1
    assert report["overlap"]["off_policy_steps"] == 1
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    records = tmp_path / RECORDS
    assert f"reward-loop view {records} --open" in done.stdout
    scored = [row for row in RecordsReader(records).rows() if row["outcome"] == "scored" and row.get("step")]
    assert len(scored) >= STEPS * QUICK.prompts * QUICK.answers
    assert all(row["judges"] for row in scored)
    assert phases(records).keys() == set(range(1, STEPS + 1))
