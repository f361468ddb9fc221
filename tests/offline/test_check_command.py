from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reward_loop.cli import app
from tests.support.gsm8k import ROOT

pytestmark = pytest.mark.processes

runner = CliRunner()

FUNCTIONS = """
def fine(solution_str, ground_truth, bonus=0.0):
    return {"score": float(solution_str.endswith(ground_truth)) + bonus, "length": len(solution_str)}

def ranks(solution_strs):
    order = sorted(range(len(solution_strs)), key=lambda i: solution_strs[i])
    return [float(order.index(i)) for i in range(len(solution_strs))]

def noisy(solution_str):
    raise ValueError("first line of a long error" + chr(10) + "'quoted' " * 100)

def empty(solution_str):
    return float(solution_str[-1] == "4")
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(FUNCTIONS)
    rows = [{"output": f"it is {i}", "gold": "4"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


FIELDS = ["rows.jsonl", "-f", "solution_str=output"]


@pytest.mark.usefixtures("files")
def test_a_report_as_text() -> None:
    done = runner.invoke(app, ["check", "reward.py:fine", *FIELDS, "-f", "ground_truth=gold", "--rows", "5"])
    assert done.exit_code == 0, done.output
    assert "fine (reward.py): sync, called in threads" in done.output
    assert "line 5" in done.output
    assert "line 6" not in done.output
    assert "length=7" in done.output
    assert "no problems found" in done.output


@pytest.mark.usefixtures("files")
def test_a_problem_sets_the_exit_status_and_json_reports_it() -> None:
    done = runner.invoke(app, ["check", "reward.py:empty", *FIELDS, "--json"])
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["problems"] == 1
    assert len(report["rows"]) == 8
    (problem,) = [finding for finding in report["findings"] if finding["status"] == "problem"]
    assert problem["check"] == "an empty response"
    assert "IndexError" in problem["text"]


@pytest.mark.usefixtures("files")
def test_a_long_error_is_shown_as_text_and_not_as_its_repr() -> None:
    done = runner.invoke(app, ["check", "reward.py:noisy", *FIELDS])
    assert done.exit_code == 1
    assert "first line of a long error" in done.output
    assert "'quoted' 'quoted'" in done.output
    assert "\\n" not in done.output


@pytest.mark.usefixtures("files")
def test_arguments_reach_the_function() -> None:
    arguments = [*FIELDS, "-f", "ground_truth=gold", "--reward-kwarg", "bonus=2", "--json"]
    done = runner.invoke(app, ["check", "reward.py:fine", *arguments])
    assert json.loads(done.stdout)["rows"][4]["score"] == 3.0


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["reward.py:fine", *FIELDS], 2, "no field 'ground_truth'"),
        (["reward.py:fin", *FIELDS], 2, "fine"),
        (["reward.py:empty", *FIELDS, "--manager", "naiv"], 2, "naive"),
        (["reward.py:empty", *FIELDS, "--manager", "batch"], 1, "requires solution_str"),
        (["reward.py:empty", *FIELDS, "-O", "retry.max_atempts=1"], 2, "did you mean 'max_attempts'"),
        (["reward.py:fine"], 2, "missing argument 'FILE'"),
    ],
)
def test_wrong_usage_is_reported(arguments: list[str], code: int, message: str) -> None:
    done = runner.invoke(app, ["check", *arguments], env={"TERMINAL_WIDTH": "200", "NO_COLOR": "1"})
    assert done.exit_code == code
    assert message in " ".join(done.output.split())


def test_a_function_that_never_lets_the_loop_run_ends_the_check_with_its_line(files: Path) -> None:
    (files / "spins.py").write_text("async def compute_score(solution_str):\n    while True:\n        pass\n")
    # A shell that runs the tests in the background has them ignore SIGINT, and children inherit that.
    handle = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{handle}; from reward_loop.cli import main; main()"
    arguments = ["check", "spins.py:compute_score", *FIELDS, "-O", "timeout=0.2"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    text = " ".join(done.stdout.split())
    assert re.search(r"compute_score \(.*spins\.py:[23]\) does not let the event loop run", text)
    assert "Fix: await slow calls" in text
