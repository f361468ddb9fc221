"""The demo, end to end: models, verl, the served reward model, the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.arithmetic.demo import QUICK, RECORDS
from reward_loop.records.files import AUDIT
from reward_loop.records.reader import RecordsReader, read_rows
from reward_loop.view.phases import PhaseReader
from tools.browser import CHROMIUM, browser, server

ROOT = Path(__file__).parents[2]
STEPS = 2


pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output folder of the demo, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, "-m", "examples.arithmetic.demo", "--quick", f"--steps={STEPS}", "--output", str(folder)],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout
    return folder, done.stdout


def test_quick_demo(output: tuple[Path, str]) -> None:
    folder, printed = output
    _, _, conclusion = printed.partition("Exact match on held-out problems")
    assert 5 < conclusion.count("\n") < 24
    report = json.loads((folder / "report.json").read_text())
    # Two steps are too few for a certain gain; the whole demo shows the learning.
    assert 0 < report["accuracy_before"] < 1
    assert 0 < report["accuracy_after"] < 1
    assert report["rewards"] == {"scored": STEPS * QUICK.prompts * QUICK.answers, "unscored": 0, "failed": 0}
    assert len(report["steps"]) == STEPS
    assert sum(report["seconds_by_phase"].values()) > 0
    assert 0 <= report["overlap"]["hidden_share"] <= 1
    assert report["overlap"]["off_policy_steps"] == 1
    assert (folder / "curves.png").stat().st_size > 10_000
    records = folder / RECORDS
    assert f"reward-loop view {records} --open" in printed
    scored = [row for row in RecordsReader(records).rows() if row["outcome"] == "scored" and row.get("step")]
    assert len(scored) >= STEPS * QUICK.prompts * QUICK.answers
    assert all(row["judges"] for row in scored)
    assert {row["probe"] for row in read_rows(records / AUDIT)} == {"canary", "labelled"}
    assert PhaseReader(records).steps().keys() == set(range(1, STEPS + 1))


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: install the package chromium")
def test_the_viewer_shows_the_demo(output: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reader = RecordsReader(output[0] / RECORDS)
    row = next(row for row in reader.rows() if row.get("step") == 1 and not row["validate"])
    problems: list[str] = []
    with server(reader.folder) as address, browser() as chromium:
        page = chromium.new_page(base_url=address)
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto("/#/run")
        page.get_by_role("link", name="1", exact=True).click()
        page.wait_for_selector("h1:has-text('Step 1')")
        page.locator(".pane:not(.groups) .tabulator-row a").first.click()
        page.wait_for_selector(".view.sample h1")
        page.goto(f"/#/sample/{row['id']}")
        page.get_by_text("/classify").first.wait_for()
        page.goto("/#/timeline/1")
        page.wait_for_selector("canvas")
    assert problems == []
