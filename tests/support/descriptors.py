"""Finds file descriptors that a piece of code leaves open."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


def left_open(scenario: Callable[[Callable[[], None]], Any]) -> list[str]:
    """Run ``scenario`` in a new process, and return what it left open there, such as ``["socket:[31337]"]``.

    A new process is needed because other threads of the test process also open and close descriptors: the watchdog,
    Ray's threads, and threads of earlier tests.

    Args:
        scenario: a function at module level. It receives a callback, which it must call when all descriptors that may
            stay open have been opened.
    """
    program = f"from {__name__} import _main; _main({scenario.__module__!r}, {scenario.__qualname__!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=_ROOT, stdout=subprocess.PIPE, text=True, timeout=600, check=True
    )
    left: list[str] = json.loads(done.stdout.splitlines()[-1])
    return left


def _main(module: str, name: str) -> None:
    before: Counter[str] = Counter()

    def settled() -> None:
        before.update(_open_descriptors())

    getattr(importlib.import_module(module), name)(settled)
    assert before, f"{name} does not say when it has settled"
    print(json.dumps(list((_open_descriptors() - before).elements())))


def _open_descriptors() -> Counter[str]:
    """Count the open descriptors of this process by target."""
    found: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found[os.readlink(f"/proc/self/fd/{descriptor}")] += 1
    return found
