"""Event loops of other threads: whether one runs its callbacks, the line that blocks it, and one in the background."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from reward_loop._util.text import user_frame

_OF_THE_LOOP = {
    "asyncio/events.py": {"_run"},
    "asyncio/runners.py": {"run"},
    "asyncio/base_events.py": {"run_until_complete", "run_forever", "_run_once"},
    "selectors.py": {"select"},
}
"""The functions of Python that run an event loop: the frames after the last of them are those of a callback. uvloop has
no such frames of its own."""


T = TypeVar("T")


class LoopPulse:
    """Finds out from another thread whether an event loop runs. Create it in the loop's thread.

    Native code that keeps Python's global lock also stops the thread that asks, so it cannot be found.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Weak: a watched loop that has been closed must not stay in memory.
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


def line_on_loop(thread: int) -> str | None:
    """Return the innermost line of the user's code on the event loop in this thread; ``None`` if it runs none."""
    # Up to Python 3.11.8, a collection within the call can stop the whole process: python/cpython#106883.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(thread)
    finally:
        if was_enabled:
            gc.enable()
    stack = [] if frame is None else list(traceback.extract_stack(frame))
    # The stack of the callback; empty if there is none.
    found = user_frame(stack[1 + max((i for i, entry in enumerate(stack) if _is_of_the_loop(entry)), default=-1) :])
    return None if found is None else f"{found.name} ({Path(found.filename).name}:{found.lineno})"


def _is_of_the_loop(entry: traceback.FrameSummary) -> bool:
    return any(entry.filename.endswith(file) and entry.name in names for file, names in _OF_THE_LOOP.items())


logger = logging.getLogger(__name__)

BLOCKED_S = 10.0
"""The seconds for which the loop may run no callback before its thread, a daemon, is left running at the end."""
_LOOK_S = 1.0


@contextmanager
def in_background(new: Callable[[], AbstractAsyncContextManager[T]], *, name: str) -> Iterator[T]:
    """Enter an async context manager on an event loop in a background thread, and exit it when the block ends.

    If the interpreter exits inside the block, the context manager is exited then. Exceptions of its entry and exit are
    raised here. If code blocks the event loop, the thread is left running when the block ends, with a warning.

        with in_background(lambda: RewardModelManager(config), name="reward-model-manager") as manager:
            ...

    Args:
        new: creates the context manager. Called in the background thread.
        name: the name of the thread.

    Yields:
        the value that the context manager returned on entry.
    """
    background = _Background(new, name)
    # Not an anyio portal: at exit, the interpreter joins the portal's thread before any handler could stop it.
    atexit.register(background.stop)
    try:
        yield background.start()
    finally:
        atexit.unregister(background.stop)
        background.stop()


class _Background(Generic[T]):
    def __init__(self, new: Callable[[], AbstractAsyncContextManager[T]], name: str) -> None:
        self._new = new
        self._loop = asyncio.new_event_loop()
        # Created here, so that `stop` can cancel it even if the thread has not run yet.
        self._serving = self._loop.create_task(self._serve())
        self._entered: Future[T] = Future()
        self._left: Future[None] = Future()
        self._name = name
        self._pulse: LoopPulse | None = None
        # A daemon: if code blocks the loop, `stop` leaves the thread running, and the interpreter must still exit.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> T:
        self._thread.start()
        return self._entered.result()

    def stop(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the thread has just ended and closed the loop
                self._loop.call_soon_threadsafe(self._serving.cancel)
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
            if self._pulse is not None and self._pulse.blocked_s() > BLOCKED_S:
                logger.warning("%s: its thread is left running, since %s blocks it", self._name, self._pulse.line())
                return
        if self._left.done():
            self._left.result()

    def _run(self) -> None:
        # A Runner also shuts down the asynchronous generators of the loop, which close HTTP sessions, and its executor.
        with asyncio.Runner(loop_factory=lambda: self._loop):
            try:
                self._loop.run_until_complete(self._serving)
            # Also SystemExit, for example: `start` would wait for ever, or the caller would not see it.
            except BaseException as error:
                if not self._entered.done():
                    self._entered.set_exception(error)
                elif not isinstance(error, asyncio.CancelledError):
                    self._left.set_exception(error)

    async def _serve(self) -> None:
        self._pulse = LoopPulse(self._loop)
        async with self._new() as value:
            self._entered.set_result(value)
            await asyncio.Event().wait()  # until `stop` cancels this task
