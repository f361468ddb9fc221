"""Ctrl-C in commands: it always reaches the event loop, and several in a row are one."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

__all__ = ["handle", "run"]

T = TypeVar("T")

_SAME_SECONDS = 1.0
"""Signals within this time of the first belong to it: launchers send several, and keys are held down."""


class _CtrlC:
    """The handler of SIGINT in a process that is a command.

    Python's own, and that of `asyncio.run` from the second signal on, raise KeyboardInterrupt wherever the main thread
    is: within a lock, that is held for ever then, or within what tidies up after the first. This one raises it once,
    and never where an event loop runs. A command that is still there a second later is ended by another Ctrl-C.
    """

    def __init__(self) -> None:
        self.pressed: float | None = None
        """When it first came, by `time.monotonic`."""
        self.stop: Callable[[], Any] | None = None
        """Stops the event loop's work, if one runs."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.pressed is None:
            self.pressed = now
            if self.stop is None:
                raise KeyboardInterrupt
            self.stop()
        elif now > self.pressed + _SAME_SECONDS:
            show_cursor = b"\x1b[?25h" if os.isatty(2) else b""
            os.write(2, show_cursor + b"\nInterrupted again: ended at once.\n")
            os._exit(130)


def handle() -> None:
    """Handle Ctrl-C in this process from now on, unless it is ignored. For commands alone."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _CtrlC())
        # The interpreter takes handlers away before it ends, but leaves a signal that is ignored.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` as `asyncio.run` does, in a loop that every signal wakes.

    `asyncio.run` handles Ctrl-C when its loop next wakes up by itself. Where the signal reached another thread, or came
    just before the loop went to sleep, that is when the next sample ends: never, if the function hangs.

    Raises:
        KeyboardInterrupt: Ctrl-C came; ``main`` was cancelled, and has ended.
    """
    ctrl_c = signal.getsignal(signal.SIGINT)
    if not isinstance(ctrl_c, _CtrlC):
        return asyncio.run(_awake(main))
    try:
        result = asyncio.run(_stopped_by(ctrl_c, main))
    except asyncio.CancelledError:
        if ctrl_c.pressed is None:
            raise
        raise KeyboardInterrupt from None
    finally:
        ctrl_c.stop = None
    if ctrl_c.pressed is not None:  # so late that nothing was left to cancel, or that was swallowed
        raise KeyboardInterrupt
    return result


async def _stopped_by(ctrl_c: _CtrlC, main: Coroutine[Any, Any, T]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            loop.call_soon_threadsafe(task.cancel)

    ctrl_c.stop = stop
    return await _awake(main)


async def _awake(main: Coroutine[Any, Any, T]) -> T:
    if threading.current_thread() is threading.main_thread():  # elsewhere, Ctrl-C is not ours
        # A loop that handles any signal itself is woken by all of them. This one is of no other use here.
        asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, lambda: None)
    return await main
