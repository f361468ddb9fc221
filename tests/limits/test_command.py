"""`reward-loop limits`, asked of real jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reward_loop import RewardLoopConfig
from reward_loop.cli import app
from reward_loop.config import LimitConfig
from reward_loop.limits.server import serve_limits
from tests.gsm8k import ROOT

JOB = """
import asyncio, os, sys
import reward_loop
from reward_loop import NaiveRewardLoopManager, RewardSample

async def compute_score(solution_str):
    async with reward_loop.limit("judge"):
        for _ in range(10):
            await asyncio.sleep(0)  # the others ask, too
        print("asked", flush=True)
        await asyncio.Event().wait()

async def main():
    options = {"limits": {"judge": {"max_concurrent": 1, "requests_per_minute": 600}}, "job": sys.argv[1] or None}
    manager = NaiveRewardLoopManager(options, compute_score=compute_score)
    await asyncio.gather(*(manager.run_single(RewardSample(str(i))) for i in range(3)))

asyncio.run(main())
"""

OPTIONS = RewardLoopConfig(limits={"judge": {"max_concurrent": 1, "requests_per_minute": 600}})


class Jobs:
    """Processes that score samples: three each, in a limit of one."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._script = folder / "job.py"
        self._script.write_text(JOB)
        self._stack = stack
        self.running: list[subprocess.Popen[str]] = []

    def start(self, address: str = "") -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = self._stack.enter_context(
            subprocess.Popen(
                [sys.executable, self._script, address], stdout=subprocess.PIPE, text=True, env=environment
            )
        )
        self._stack.callback(process.kill)
        self.running.append(process)
        return process

    def limits(self, *arguments: str, code: int = 0) -> str:
        """Run the command for these processes alone, whatever else runs on the machine."""
        pids = [part for process in self.running for part in ("--pid", str(process.pid))]
        done = CliRunner().invoke(app, ["limits", *arguments, *pids, "--timeout", "60"], env={"COLUMNS": "240"})
        assert done.exit_code == code, done.output
        return " ".join((done.stdout if "--json" in arguments else done.output).split())

    def shown(self) -> list[dict[str, Any]]:
        return json.loads(self.limits("--json"))


def until(condition: Callable[[], bool]) -> None:
    late = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < late


def asked(process: subprocess.Popen[str]) -> None:
    """Wait until one more sample of a process is within its limit."""
    assert process.stdout is not None
    assert process.stdout.readline() == "asked\n"


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    with ExitStack() as stack:
        yield Jobs(tmp_path, stack)


def test_a_process_of_its_own_is_shown_and_changed(jobs: Jobs) -> None:
    process = jobs.start()
    asked(process)
    text = jobs.limits()
    assert f"job process {process.pid}" in text
    assert "judge 1 of 1 2 1 of 600 0 3600 s" in text
    text = jobs.limits("judge", "max_concurrent=2")
    pid = process.pid
    assert text.startswith(f"Changing judge of job process {pid} (process {pid}): max_concurrent 1 -> 2 job process")
    assert "resumed job: reward_loop.limits.judge.max_concurrent=2" in text
    asked(process)  # a second one, at once
    assert "judge 2 of 2 1 2 of 600" in jobs.limits("judge")
    jobs.limits("judge", "max_concurrent=null", "requests_per_minute=2")
    ((state,),) = [job["states"] for job in jobs.shown()]
    limit = state["limits"]["judge"]
    assert (limit["in_flight"], limit["waiting"], limit["requests_per_minute"]) == (2, 1, 2)


def test_a_change_holds_for_all_workers_of_a_job(jobs: Jobs) -> None:
    with serve_limits(OPTIONS) as address:
        first = jobs.start(address)
        asked(first)
        second = jobs.start(address)
        # One place for both: the second process waits, until it is killed that has the place, or there are more.
        until(lambda: jobs.shown()[0]["states"][0]["limits"]["judge"]["waiting"] == 5)
        (job,) = jobs.shown()
        assert job["job"] == address.rpartition(":")[0]
        assert sorted(job["processes"]) == sorted([first.pid, second.pid])
        jobs.limits("judge", "max_concurrent=6")
        for process in (first, first, second, second, second):
            asked(process)
        first.kill()
        first.wait()
        jobs.running.remove(first)
        until(lambda: jobs.shown()[0]["states"][0]["limits"]["judge"]["in_flight"] == 3)


def test_the_help_names_all_options_of_a_limit() -> None:
    text = CliRunner().invoke(app, ["limits", "--help"], env={"COLUMNS": "240"}).output
    assert [option for option in LimitConfig.model_fields if option not in text] == []


def test_wrong_usage_is_an_error_that_names_the_fix(jobs: Jobs) -> None:
    process = jobs.start()
    asked(process)
    assert "unknown limit 'juge'; did you mean 'judge'? Configured: judge" in jobs.limits("juge", code=2)
    assert "unknown limit 'search'. Configured: judge" in jobs.limits("search", "max_concurrent=1", code=2)
    assert "unknown option; did you mean 'max_concurrent'" in jobs.limits("judge", "max_concurent=2", code=2)
    assert "limits.judge.max_concurrent: Input should be greater than or equal to 1; got 0" in jobs.limits(
        "judge", "max_concurrent=0", code=2
    )
    assert "name the limit first" in jobs.limits("max_concurrent=2", code=2)
    assert "expected NAME=VALUE, got 'fast'" in jobs.limits("judge", "fast", code=2)
    assert "judge 1 of 1 2 1 of 600" in jobs.limits()
    jobs.start()
    asked(jobs.running[-1])
    text = jobs.limits("judge", "max_concurrent=2", code=2)
    assert f"choose one with --pid: process {process.pid} (--pid {process.pid}); process" in text
    jobs.running[0].kill()
    jobs.running[0].wait()
    del jobs.running[1:]
    text = jobs.limits("judge", code=1)
    assert f"process {process.pid}: " in text
    assert "none of the queried processes scores samples" in text
