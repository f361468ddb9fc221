"""What a piece of code leaves open."""

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

_ROOT = Path(__file__).parents[1]


def left_open(scenario: Callable[[Callable[[], None]], Any]) -> list[str]:
    """Runs ``scenario`` in a process of its own, and says what it has left open there, e.g. ``["socket:[31337]"]``.

    The process of the tests opens and closes descriptors on its own: its watchdog answers `reward-loop stuck` of other
    processes, Ray's and earlier tests' threads end when they like.

    Args:
        scenario: a function of a module. It gets one to call once everything that may stay open is there.
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
    """Counts the descriptors of this process by what they lead to."""
    found: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            found[os.readlink(f"/proc/self/fd/{descriptor}")] += 1
    return found
