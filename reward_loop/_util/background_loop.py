"""Runs an async context manager in a background thread, for synchronous programs."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Generic, TypeVar

from reward_loop._util.loop_pulse import LoopPulse

__all__ = ["in_background"]

logger = logging.getLogger(__name__)

BLOCKED_S = 10.0
"""The seconds for which the loop may run no callback before its thread, a daemon, is left running at the end."""
_LOOK_S = 1.0

T = TypeVar("T")


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
        self._serving = self._loop.create_task(self._serve())
        self._entered: Future[T] = Future()
        self._left: Future[None] = Future()
        self._name = name
        self._pulse: LoopPulse | None = None
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
        with asyncio.Runner(loop_factory=lambda: self._loop), contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)

    async def _serve(self) -> None:
        self._pulse = LoopPulse(self._loop)
        try:
            async with self._new() as value:
                self._entered.set_result(value)
                await asyncio.Event().wait()
        except Exception as error:
            (self._left if self._entered.done() else self._entered).set_exception(error)
