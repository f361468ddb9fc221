from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from reward_loop._util.process import children, descendants, kill, kill_marked, raise_descriptor_limit

ANY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1_000_000), (65_536, 1_000_000)),
        ((1024, ANY), (65_536, ANY)),
        ((100_000, 1_000_000), (100_000, 1_000_000)),
        ((ANY, ANY), (ANY, ANY)),
    ],
)
def test_the_limit_on_open_files_is_raised_and_never_lowered(
    before: tuple[int, int], after: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[Any, tuple[int, int]] = {resource.RLIMIT_NOFILE: before}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    raise_descriptor_limit()
    assert limits[resource.RLIMIT_NOFILE] == after


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(child.pid, flush=True)
child.wait()
print("killed", flush=True)
sys.stdin.read()
"""

KILLS_ALL = """
import subprocess, sys
from reward_loop._util.process import adopt_orphans, children, kill_children
import os
adopt_orphans()
sleeps = [sys.executable, "-c", "import time; time.sleep(1000)"]
starts = f"import subprocess; subprocess.Popen({sleeps!r}, start_new_session=True).wait()"
children_of = [subprocess.Popen([sys.executable, "-c", starts]) for _ in range(2)]
while not all(children(child.pid) for child in children_of):
    pass
kill_children()
print(children(os.getpid()))
"""


def test_children_and_descendants_are_found_and_killed() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert children(parent.pid) == [child]
        assert descendants(parent.pid) == [parent.pid, child]
        kill(child)
        assert parent.stdout.readline() == "killed\n"
        assert children(parent.pid) == []
        parent.communicate("")


def test_all_descendants_are_killed_also_in_other_sessions() -> None:
    done = subprocess.run([sys.executable, "-c", KILLS_ALL], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"


HOLDS_A_LARGE_FILE = """
import os, time
file = os.memfd_create("large")
for _ in range(16):
    os.write(file, bytes(1 << 24))
print(flush=True)
time.sleep(1000)
"""


def test_exiting_processes_have_ended_too_although_their_mark_is_gone() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_A_LARGE_FILE], env={**os.environ, "MARK": "exiting"}, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        status, environment = Path(f"/proc/{process.pid}/status"), Path(f"/proc/{process.pid}/environ")
        process.kill()
        with suppress(ProcessLookupError):  # another way in which the kernel says that it is gone
            while environment.read_bytes():
                pass
        kill_marked("MARK=exiting")
        assert "State:\tZ" in status.read_text()


def test_marked_processes_are_awaited_also_with_many_open_files() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most < 2048:
        pytest.skip("needs 2048 open files")
    raise_descriptor_limit()
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        sleeps = [sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)"]
        with subprocess.Popen(sleeps, env={**os.environ, "MARK": "many"}, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            kill_marked("MARK=many")
            assert process.wait(60) == -signal.SIGKILL
    finally:
        for file in files:
            os.close(file)
