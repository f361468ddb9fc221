"""Whether an event loop runs its callbacks, and the line of code that blocks it, as seen from another thread."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path

from reward_loop._util.text import user_frame

__all__ = ["LoopPulse", "line_on_loop", "stack_on_loop"]

_OF_THE_LOOP = {
    "asyncio/events.py": {"_run"},
    "asyncio/runners.py": {"run"},
    "asyncio/base_events.py": {"run_until_complete", "run_forever", "_run_once"},
    "selectors.py": {"select"},
}
"""The functions of Python that run an event loop: the frames after the last of them are those of a callback. uvloop has
no such frames of its own."""


class LoopPulse:
    """Finds out from another thread whether an event loop runs. Create it in the loop's thread.

    Native code that keeps Python's global lock also stops the thread that asks, so it cannot be found.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self.thread = threading.get_ident()
        self._beat = threading.Event()
        self._asked: float | None = None

    def blocked_s(self, wait_s: float = 0.0) -> float:
        """Return the seconds for which the loop has not run the callback of an earlier call; 0 if it has.

        Args:
            wait_s: seconds to wait for the callback.
        """
        if self._asked is None:
            loop = self._loop()
            self._beat.clear()
            try:
                if loop is None or not loop.is_running():
                    return 0.0
                self._asked = time.monotonic()
                loop.call_soon_threadsafe(self._beat.set)
            except RuntimeError:  # the loop has been closed
                self._asked = None
                return 0.0
        loop = self._loop()
        if self._beat.wait(wait_s) or loop is None or loop.is_closed():
            self._asked = None
            return 0.0
        return time.monotonic() - self._asked

    def line(self) -> str:
        """Return the innermost line of the user's code on the loop, such as ``compute_score (reward.py:12)``."""
        return line_on_loop(self.thread) or "code that is unknown"


def stack_on_loop(thread: int) -> list[traceback.FrameSummary]:
    """Return the stack of the callback that the event loop in this thread runs; empty if it runs none."""
    frame = sys._current_frames().get(thread)
    stack = [] if frame is None else list(traceback.extract_stack(frame))
    return stack[1 + max((i for i, entry in enumerate(stack) if _is_of_the_loop(entry)), default=-1) :]


def line_on_loop(thread: int) -> str | None:
    """Return the innermost line of the user's code on the event loop in this thread; ``None`` if it runs none."""
    found = user_frame(stack_on_loop(thread))
    return None if found is None else f"{found.name} ({Path(found.filename).name}:{found.lineno})"


def _is_of_the_loop(entry: traceback.FrameSummary) -> bool:
    return any(entry.filename.endswith(file) and entry.name in names for file, names in _OF_THE_LOOP.items())
