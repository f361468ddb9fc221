"""The reaper of servers that do not follow a pipe themselves, and the processes that they start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import Watched

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]

SERVER = """
import json, os, subprocess, sys, time
child = [sys.executable, "-c", "import time; time.sleep(1000)"]
# One that stays in the group, as vLLM's engine cores do, and one with a session of its own.
pids = [os.getpid(), subprocess.Popen(child).pid, subprocess.Popen(child, start_new_session=True).pid]
print(json.dumps(pids), flush=True)
if sys.argv[1] == "exit":
    sys.stdin.readline()
    sys.exit(7)
while True:  # Python notices a signal that comes just before a sleep begins only when that is over
    time.sleep(0.1)
"""


def reaper(*command: str) -> tuple[subprocess.Popen[str], int]:
    """Start a reaper with a command; return its process and this end of its pipe."""
    child_fd, parent_fd = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "reward_loop.serving.reaper", str(child_fd), *command],
        pass_fds=(child_fd,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    os.close(child_fd)
    return process, parent_fd


@pytest.fixture
def reaped() -> Iterator[Any]:
    """Starts a reaper with a server; returns its process, this end of its pipe, and all processes."""
    started: list[subprocess.Popen[str]] = []
    strays: list[int] = []

    def start(how: str = "run") -> tuple[subprocess.Popen[str], int, Watched]:
        process, parent_fd = reaper(sys.executable, "-c", SERVER, how)
        started.append(process)
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        strays.append(pids[-1])
        return process, parent_fd, Watched([process.pid, *pids])

    yield start
    for pid in strays:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in started:
        process.kill()
        process.communicate()


def test_closing_the_pipe_kills_all_processes(reaped: Any) -> None:
    _, parent_fd, watched = reaped()
    os.close(parent_fd)
    assert watched.left_after() == 0


def test_child_processes_are_killed_when_the_server_exits(reaped: Any) -> None:
    process, _, watched = reaped("exit")
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.wait(60) == 7
    assert watched.left_after(0) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_forwarded_and_the_reaper_ends_by_the_same_signal(reaped: Any, number: signal.Signals) -> None:
    process, _, watched = reaped()
    process.send_signal(number)
    # Python ends by a SIGINT as a signal ends others.
    assert process.wait(60) == -number
    assert watched.left_after(0) == 0
