from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration  # starts commands

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
