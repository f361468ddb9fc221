from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.markup import escape
from rich.table import Table

from reward_loop._util.standard_streams import console

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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x1b]0;title\x9c", r"\x1b]0;title\x9c"),
        ("\x9b2J\x7f", r"\x9b2J\x7f"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("two\nlines", "two\nlines"),
    ],
)
def test_no_text_controls_the_terminal(text: str, shown: str) -> None:
    file = io.StringIO()
    out = console(file)
    out.print(escape(text))
    assert file.getvalue() == f"{shown}\n"
    table = Table("name", box=None)
    table.add_row(escape(text))
    out.print(table)
    assert not {"\x1b", "\x9b", "\x9c", "\x7f", "\u202e"} & set(file.getvalue())


def test_nothing_is_cut_in_a_pipe() -> None:
    file = io.StringIO()
    table = Table(*"ab", box=None)
    table.add_row("x" * 500, "1")
    console(file).print(table)
    assert "x" * 500 in file.getvalue()
