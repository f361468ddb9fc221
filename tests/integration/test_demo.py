"""The demo, end to end: models, verl, the served reward model, the report."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_runs import FEW
from examples.arithmetic import demo
from examples.arithmetic.demo import QUICK, RECORDS
from reward_loop.index.phases import StepTimes
from reward_loop.records.reader import RecordsReader
from tests.support.gsm8k import ROOT
from tests.support.local_ray import in_local_ray
from tools.browser import CHROMIUM, browser, server

STEPS = 2
FEWER = replace(QUICK, recipe=FEW, prompts=16, answers=4, validate=16, judge_latency=0.2)

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output folder of the demo, and what it printed. The training of its models would take half a minute."""
    folder, printed = tmp_path_factory.mktemp("demo"), io.StringIO()
    current = tmp_path_factory.mktemp("current")
    handler, command = signal.getsignal(signal.SIGTERM), demo.training_command

    def command_in_local_ray(*args: Any) -> list[str]:
        return in_local_ray(command(*args), current, VERL_FILE_LOGGER_PATH=folder / "metrics.jsonl")

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(current)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("COLUMNS", "120")
        patch.setattr(demo, "QUICK", FEWER)
        patch.setattr(demo, "training_command", command_in_local_ray)
        try:
            status = demo.main(["--quick", f"--steps={STEPS}", "--output", str(folder)])
        finally:
            signal.signal(signal.SIGTERM, handler)
    assert status == 0, printed.getvalue()
    return folder, printed.getvalue()


def test_quick_demo(output: tuple[Path, str]) -> None:
    folder, printed = output
    _, _, conclusion = printed.partition("Exact match on held-out problems")
    assert 5 < conclusion.count("\n") < 24
    report = json.loads((folder / "report.json").read_text())
    # Without a policy that can add, and in two steps, nothing is learned; the whole demo shows the learning.
    assert 0 <= report["accuracy_before"] < 1
    assert 0 <= report["accuracy_after"] < 1
    assert report["rewards"] == {"scored": STEPS * FEWER.prompts * FEWER.answers, "unscored": 0, "failed": 0}
    assert len(report["steps"]) == STEPS
    assert sum(report["seconds_by_phase"].values()) > 0
    assert 0 <= report["overlap"]["hidden_share"] <= 1
    assert report["overlap"]["off_policy_steps"] == 1
    assert (folder / "curves.png").stat().st_size > 10_000
    records = folder / RECORDS
    assert f"reward-loop view {records} --open" in printed
    scored = [row for row in RecordsReader(records).rows() if row["outcome"] == "scored" and row.get("step")]
    assert len(scored) >= STEPS * FEWER.prompts * FEWER.answers
    assert all(row["judges"] for row in scored)
    assert StepTimes(records).steps().keys() == set(range(1, STEPS + 1))


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
