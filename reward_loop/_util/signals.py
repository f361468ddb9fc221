"""Handles Ctrl-C in commands: the second one ends the process at once; signals within a second count once.

Also returns the names of signals, for messages.
"""

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
from typing import Any, NoReturn, TypeVar

from reward_loop._util.event_loops import line_on_loop

T = TypeVar("T")

_SAME_SECONDS = 1.0
"""Signals within this time after the first are ignored: launchers send several, and a held key repeats."""


class _CtrlC:
    """The SIGINT handler of a command.

    ============================  =======================================
    Signal                        Effect
    ============================  =======================================
    first, no event loop          raises KeyboardInterrupt
    first, event loop is running  cancels the main task (``stop``)
    repeated within one second    ignored
    repeated later                exits the process with status 130, also if a function blocks the event loop
    ============================  =======================================

    Python's default handler, and that of `asyncio.run` from the second signal on, raise KeyboardInterrupt at any point
    of the main thread: while it holds a lock, which is then never released, or during the clean-up after the first
    signal.
    """

    def __init__(self) -> None:
        self.pressed: float | None = None
        """Time of the first signal (`time.monotonic`)."""
        self.stop: Callable[[], Any] | None = None
        """Cancels the main task of the event loop; ``None`` if no event loop is running."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.pressed is None:
            self.pressed = now
            if self.stop is None:
                raise KeyboardInterrupt
            self.stop()
        elif now > self.pressed + _SAME_SECONDS:
            end_at_once()


def end_at_once() -> NoReturn:
    """End the process with status 130, and name what its event loop runs. Called by signal handlers."""
    show_cursor = "\x1b[?25h" if os.isatty(2) else ""
    line = line_on_loop(threading.get_ident())
    where = f" in {line}" if line else ""
    # Not `print`, which raises an error if the signal has interrupted another `print`.
    os.write(2, f"{show_cursor}\nInterrupted again{where}: ended at once.\n".encode())
    os._exit(130)


def handle() -> None:
    """Install the Ctrl-C handler, unless SIGINT is ignored or has another handler. For commands only."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _CtrlC())
        # At exit, the interpreter removes handlers, but an ignored signal stays ignored.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def name_of(number: int) -> str:
    """Return a signal's name, such as ``SIGTERM``; ``signal 37`` for a real-time signal, most of which have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` like `asyncio.run`. The first Ctrl-C cancels it, the second one ends the process.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; ``main`` was cancelled and has ended.
    """
    ctrl_c = signal.getsignal(signal.SIGINT)
    if not isinstance(ctrl_c, _CtrlC):
        return asyncio.run(main)
    try:
        result = asyncio.run(_stopped_by(ctrl_c, main))
    except asyncio.CancelledError:
        # Not the cancellation of `stop`: this one is an error of `main`.
        if ctrl_c.pressed is None:
            raise
        raise KeyboardInterrupt from None
    finally:
        ctrl_c.stop = None
    if ctrl_c.pressed is not None:  # main had already ended, or swallowed the cancellation
        raise KeyboardInterrupt
    return result


async def _stopped_by(ctrl_c: _CtrlC, main: Coroutine[Any, Any, T]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            # Not `task.cancel` alone: the signal may arrive while the loop waits, and must wake it.
            loop.call_soon_threadsafe(task.cancel)

    ctrl_c.stop = stop
    return await main
