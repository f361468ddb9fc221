"""Collects the calls of our functions in a process, for `path.py`.

Child processes import a copy of this file as ``sitecustomize``, which starts it, so that it also sees what a child
process does before and after the user's function.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

FOLDER = "REWARD_LOOP_BENCHMARK_CALLS"
"""The environment variable with the folder to which child processes write their calls."""
THREADS = ("MainThread", "reward-function")
"""The threads on the path: the event loop's, and those of sync functions."""

_PACKAGE = str(Path(getattr(importlib.util.find_spec("reward_loop"), "origin", "")).parent) + os.sep


class Call(NamedTuple):
    """A call of a function, or the continuation of a coroutine."""

    time: float
    """By `time.monotonic`, which all processes of the machine share."""
    process: int
    module: str
    function: str


def trace(calls: list[Call] | None = None) -> None:
    """Trace this thread, and threads that start later: into a list, or to the file of this process."""

    def see(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_PACKAGE) or code.co_name.startswith("<"):
            return
        if threading.current_thread().name not in THREADS:
            return
        call = Call(time.monotonic(), os.getpid(), code.co_filename.removeprefix(_PACKAGE), code.co_qualname)
        if calls is not None:
            calls.append(call)
            return
        file = os.open(f"{os.environ[FOLDER]}/{os.getpid()}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(file, f"{json.dumps(call)}\n".encode())
        os.close(file)

    threading.setprofile(see)
    sys.setprofile(see)


def stop() -> None:
    """Stop tracing."""
    threading.setprofile(None)  # type: ignore[arg-type]
    sys.setprofile(None)


def read(folder: Path) -> list[Call]:
    """Return the calls of all child processes."""
    return [Call(*json.loads(line)) for file in folder.glob("[0-9]*") for line in file.read_text().splitlines()]


if __name__ == "sitecustomize":
    trace()
