"""A fork server of this process: programs that start with torch and other modules imported, as Ray's workers do.

An import of torch and transformers takes some 5 s of CPU time, and one of verl 10 s.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.verl_cpu import ENVIRONMENT
from tests.support.gsm8k import ROOT
from tests.support.preload import preloaded

PROGRAM = Path(__file__).with_name("forked_program.py")

TIMEOUT_S = 600
"""A run of verl takes less than a minute on two quiet cores. An integration test has time for two runs."""

_open = ExitStack()
atexit.register(_open.close)
_starting = threading.Lock()


def module_environment() -> dict[str, str]:
    """The environment variables of a run that are read when modules are imported."""
    # Ray's workers import the agent loops from the repository. It comes first, because verl 0.9.0 also has a `tests`.
    path = (ROOT, os.environ.get("PYTHONPATH"))
    return {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(str(folder) for folder in path if folder)}


def worker_python() -> str:
    """The Python of Ray's workers: it forks them from a process with preloaded modules, which starts at the first call.

    Each fork server takes some 8 s of CPU time, so the runs share one.
    """
    with _starting:
        return _worker_python()


@functools.cache
def _worker_python() -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENVIRONMENT | module_environment()).items():
            patch.setenv(name, value)
        return _open.enter_context(preloaded())


def forking_python(folder: Path, fork_server: str | None = None) -> Path:
    """Writes a program ``python`` that runs modules (``python -m MODULE``) and files in a process of the fork server.

    It writes the files of `forked_program` into its current directory.

    Args:
        folder: receives the program.
        fork_server: the Python that asks another fork server than that of `worker_python`.
    """
    python = folder / "python"
    # PYTHONPATH: without it, a process also loses the folders that the fork server has from it: the repository.
    python.write_text(
        f"""#!/bin/bash
export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}
[ "$1" != -P ] || shift
case "$1" in
    -m) shift ;;
    *.py) ;;
    *) exec {shlex.quote(sys.executable)} "$@" ;;
esac
rm -f status
{fork_server or worker_python()} {shlex.quote(str(PROGRAM))} "$@"
exit $(cat status)
"""
    )
    python.chmod(0o755)
    return python


def output_of(code: str, folder: Path) -> str:
    """Runs a script in a process of the fork server, and returns what it printed, without errors."""
    script = folder / "script.py"
    script.write_text(code)
    command = [*shlex.split(worker_python()), str(script)]
    environment = {**os.environ, **module_environment()}  # as in `forking_python`
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, cwd=folder, check=True
    )
    return done.stdout


def run_forked(module: Sequence[str], environment: Mapping[str, str], directory: Path, log: Path) -> int | None:
    """Runs ``python -m MODULE ARGUMENTS`` in a process of the fork server, and waits for its end.

    Args:
        module: the name of the module, and its arguments.
        environment: all environment variables.
        directory: its current directory, of this process alone.
        log: receives its output.

    Returns:
        The exit status, or ``None`` if a signal killed the process.

    Raises:
        AssertionError: it did not end within `TIMEOUT_S`.
    """
    trainer, ended = directory / "trainer", directory / "status"
    for file in (trainer, ended):
        file.unlink(missing_ok=True)
    command = [*shlex.split(worker_python()), str(PROGRAM), *module]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=directory, start_new_session=True
        )
    try:
        process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        end = log.read_text(errors="replace")[-5000:]
        raise AssertionError(f"the run did not end within {TIMEOUT_S} s:\n{end}") from None
    finally:
        if process.poll() is None:
            if trainer.exists():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(trainer.read_text()), signal.SIGKILL)
            process.kill()
            process.wait()
    return int(ended.read_text()) if ended.exists() else None
