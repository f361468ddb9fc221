from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import aiohttp
import pytest

from reward_loop._util.standard_streams import print_line
from reward_loop._util.web_server import reserve, url_of
from tests.gsm8k import ROOT

pytestmark = pytest.mark.integration  # starts commands

COMMAND = [sys.executable, "-c", "from reward_loop.cli import main; main()"]


def run(program: list[str], stdout: IO[Any] | None = None, *, closed: bool = False) -> subprocess.CompletedProcess[str]:
    if closed:
        program = ["sh", "-c", 'exec "$@" >&-', "sh", *program]
    return subprocess.run(program, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300, cwd=ROOT)


def test_a_line_for_a_full_disk_is_dropped_and_the_exit_status_is_0() -> None:
    program = "from reward_loop._util.standard_streams import print_line; print_line('one'); print_line('two')"
    with open("/dev/full", "w") as full:
        done = run([sys.executable, "-c", program], full)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_line_for_a_closed_stream_is_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed = (tmp_path / "x").open("w")
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    print_line("dropped")


def test_closed_standard_streams_become_the_null_device() -> None:
    program = (
        "import os, sys; from reward_loop._util.standard_streams import open_standard_streams;"
        "assert sys.stdout is None; open_standard_streams(); print('x', flush=True);"
        "sys.exit(0 if os.path.samefile('/proc/self/fd/1', os.devnull) else 'descriptor 1 is another file')"
    )
    done = run([sys.executable, "-c", program], closed=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("options", [["--version"], ["--help"], ["report", "--help"]])
def test_a_command_whose_output_cannot_be_written_ends_with_one_line_and_status_1(options: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = run([*COMMAND, *options], full)
    assert done.returncode == 1
    assert "error:" in done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("options", [["--version"], ["report", "--help"]])
def test_a_command_with_closed_output_succeeds(options: list[str]) -> None:
    done = run([*COMMAND, *options], closed=True)
    assert done.returncode == 0, done.stderr


ROUTER = {
    "reward-loop route": [*COMMAND, "route", "--worker", "http://127.0.0.1:9"],
    "python -m reward_loop.router.app": [
        *(sys.executable, "-m", "reward_loop.router.app"),
        *("--worker", '{"url": "http://127.0.0.1:9"}'),
    ],
}


@pytest.mark.parametrize("redirect", [">/dev/full", ">&-", ">/dev/full 2>&1", ">&- 2>&-"])
@pytest.mark.parametrize("command", ROUTER)
async def test_the_router_serves_although_its_output_cannot_be_written(command: str, redirect: str) -> None:
    with reserve("127.0.0.1") as reservation:
        line = [*ROUTER[command], "--port", str(reservation.getsockname()[1])]
        command_line = ["sh", "-c", f"exec {shlex.join(line)} {redirect}"]
        router = await asyncio.to_thread(subprocess.Popen, command_line, cwd=ROOT, stderr=subprocess.PIPE)
        try:
            status = await _status(router, f"{url_of(reservation)}/live")
            router.send_signal(signal.SIGTERM)
            errors = await asyncio.to_thread(lambda: router.communicate(timeout=60)[1])
            assert (status, router.returncode) == (200, 0), errors.decode()
        finally:
            router.kill()
            router.wait()


async def _status(process: subprocess.Popen[bytes], url: str) -> int:
    """The status of the first answer of a server that is starting."""
    async with asyncio.timeout(120), aiohttp.ClientSession() as session:
        while process.poll() is None:
            try:
                async with session.get(url) as response:
                    return response.status
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.05)  # it cannot say when it listens
    raise AssertionError(f"exited with status {process.returncode}: {process.communicate()[1].decode()}")


PROGRAM = """
import os, subprocess, sys, threading
from reward_loop._util.standard_streams import reserve_stdout
{before}
with reserve_stdout() as out:
    {printing}
    out.write('{{"the": "report"}}')
{after}
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def outputs_of(printing: str, before: str = "", after: str = "") -> tuple[str, str]:
    program = PROGRAM.format(printing=printing, before=before, after=after)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=True
    )
    return done.stdout, done.stderr


REPORT = '{"the": "report"}'


def test_output_of_python_c_code_and_child_processes_goes_to_stderr() -> None:
    printing = "print('one'); os.write(1, b'two\\n'); subprocess.run(['echo', 'three']); held.write('four')"
    out, err = outputs_of(printing, before="held = sys.stdout", after="held.flush()")
    assert out == REPORT
    assert {"one", "two", "three"} <= set(err.split())


def test_output_of_a_thread_after_the_report_is_dropped() -> None:
    printing = "go = threading.Event(); t = threading.Thread(target=lambda: (go.wait(), print('late'))); t.start()"
    out, _ = outputs_of(printing, after="go.set(); t.join()")
    assert out == REPORT


def test_a_closed_stdout_is_not_an_error() -> None:
    program = PROGRAM.format(printing="print('x')", before="", after="")
    command = f'exec {sys.executable} -c "$PROGRAM" >&-'
    done = subprocess.run(
        ["sh", "-c", command], env={**ENVIRONMENT, "PROGRAM": program}, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
