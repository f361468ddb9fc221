from __future__ import annotations

import json
import os
import re
import socket

import pytest
from typer.testing import CliRunner

from reward_loop import RewardSample
from reward_loop.cli import app
from reward_loop.records import ActiveSample, watch
from reward_loop.records.watchdog import _name

runner = CliRunner()


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "240")


@pytest.mark.usefixtures("wide")
def test_the_oldest_samples_are_shown_with_what_they_wait_for() -> None:
    watch()
    with ActiveSample(RewardSample("x", uid="q[7]", data_source="gsm8k"), "compute_score (judge.py)") as call:
        call.ask("POST http://judge/v1/chat/completions")
        done = runner.invoke(app, ["stuck", str(os.getpid()), "--timeout", "60", "--threads"])
        data = runner.invoke(app, ["stuck", str(os.getpid()), "--timeout", "60", "--json"])
    assert done.exit_code == 0, done.output
    assert f"process {os.getpid()}: " in done.output
    assert re.search(r"\d+ samples are running", done.output)
    for text in ("q[7]", "gsm8k", "compute_score (judge.py)", "POST", "MainThread"):
        assert text in done.output
    assert "http://judge/v1/chat/completions" in "".join(done.output.split())  # however narrow the table is
    (answer,) = json.loads(data.stdout)
    assert "q[7]" in [call["uid"] for call in answer["oldest"]]


@pytest.mark.usefixtures("wide")
def test_a_process_that_does_not_answer_is_reported() -> None:
    pid = 4_194_304 + os.getpid()  # beyond the greatest process id, and no other test process has it
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0{_name(pid)}")
        silent.listen()
        done = runner.invoke(app, ["stuck", str(pid), "--timeout", "0.05"])
    assert done.exit_code == 1
    assert f"process {pid}: it does not answer" in done.output
    done = runner.invoke(app, ["stuck", str(pid)])
    assert done.exit_code == 1
    assert "no process of this user with this ID scores samples" in done.output


@pytest.mark.usefixtures("wide")
def test_without_a_running_process_the_exit_status_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_loop.offline.report_command.processes", list)
    done = runner.invoke(app, ["stuck"])
    assert done.exit_code == 1
    assert "no process" in done.output


@pytest.mark.parametrize("timeout", ["inf", "0"])  # no process can answer within 0 s
def test_a_timeout_beyond_the_range_of_the_clock_is_refused(timeout: str) -> None:
    for command in ("stuck", "limits"):
        found = runner.invoke(app, [command, "--timeout", timeout])
        assert (found.exit_code, "--timeout" in found.output) == (2, True)
