"""Handles Ctrl-C in commands: it also ends a blocked event loop, and repeated signals within a second count once.

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
from typing import Any, Self, TypeVar

from reward_loop._util.event_loops import LoopPulse, line_on_loop

__all__ = ["LoopBlocked", "LoopBreaker", "end_blocking_code", "handle", "name_of", "run"]

T = TypeVar("T")

_SAME_SECONDS = 1.0
"""Signals within this time after the first are ignored: launchers send several, and a held key repeats."""


BLOCKED_S = 2.0
"""The seconds for which an event loop may run no callback after a signal, before the code that blocks it is ended."""

_BREAKS = 3
"""The number of exceptions that are raised in code that blocks the event loop. After that, the process exits."""


# `except Exception` in the code that blocks must not catch it, and asyncio raises it out of the event loop.
class LoopBlocked(KeyboardInterrupt):
    """Raised in code that blocks the event loop of a command, because the command should end.

    Args:
        line: the line of the code, such as ``compute_score (reward.py:12)``.
        is_own: whether the command itself ended it, by `end_blocking_code`, and no signal.
    """

    def __init__(self, line: str, is_own: bool) -> None:
        super().__init__(f"{line} blocked the event loop")
        self.line, self.is_own = line, is_own
        self.add_note(f"{self}: an `async def` must await whatever takes long")


class LoopBreaker:
    """Ends code that blocks the event loop of the main thread, after a signal. Use it as a context on the loop.

    After `start`, a thread watches the loop. It sends SIGINT to the main thread, whose handler must call `raises`
    first. If the code catches the exception each time, the process exits with status 130. Code that keeps Python's
    global lock cannot be ended.
    """

    def __init__(self) -> None:
        self._pulse: LoopPulse | None = None
        self._started, self._ended = threading.Event(), threading.Event()
        self._breaking = False

    def __enter__(self) -> Self:
        self._pulse = LoopPulse(asyncio.get_running_loop())
        threading.Thread(target=self._watch, name="loop-breaker", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # In this order: `_watch` must see the end when the other event wakes it.
        self._ended.set()
        self._started.set()

    def start(self) -> None:
        """Watch the loop from now on. Called by signal handlers: it starts no thread and waits for no lock."""
        self._started.set()

    def raises(self) -> bool:
        """Return whether the signal is that of this object; if the loop is still blocked, raise `LoopBlocked`."""
        if not self._breaking:
            return False
        self._breaking = False
        if (line := line_on_loop(threading.get_ident())) is not None:
            raise LoopBlocked(line, not self._started.is_set())
        return True

    def end_now(self) -> None:
        """Interrupt what the event loop of the main thread runs."""
        self._breaking = True
        main = threading.main_thread().ident
        assert main is not None
        # To the main thread itself: a system call that blocks it then returns, and Python runs the handler there.
        signal.pthread_kill(main, signal.SIGINT)

    def _watch(self) -> None:
        assert self._pulse is not None
        self._started.wait()
        breaks = 0
        while not self._ended.wait(BLOCKED_S / 10):
            if self._pulse.blocked_s(BLOCKED_S) < BLOCKED_S:
                continue
            if breaks == _BREAKS:
                line = self._pulse.line()
                # Not `print`: the main thread may hold the lock of the stream.
                os.write(2, f"\n{line} blocks the event loop, and cannot be interrupted: ended at once.\n".encode())
                os._exit(130)
            breaks += 1
            self.end_now()


class _CtrlC:
    """The SIGINT handler of a command.

    ============================  =======================================
    Signal                        Effect
    ============================  =======================================
    first, no event loop          raises KeyboardInterrupt
    first, event loop is running  cancels the main task (``stop``); if the loop is blocked, ends the code that blocks it
    repeated within one second    ignored
    repeated later                exits the process with status 130
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
        self.breaker: LoopBreaker | None = None
        """Ends code that blocks the event loop; ``None`` if no event loop is running."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.breaker is not None and self.breaker.raises():
            return
        now = time.monotonic()
        if self.pressed is None:
            self.pressed = now
            if self.stop is None:
                raise KeyboardInterrupt
            self.stop()
            if self.breaker is not None:
                self.breaker.start()
        elif now > self.pressed + _SAME_SECONDS:
            show_cursor = b"\x1b[?25h" if os.isatty(2) else b""
            # Not `print`, which raises an error if the signal has interrupted another `print`.
            os.write(2, show_cursor + b"\nInterrupted again: ended at once.\n")
            os._exit(130)


def handle() -> None:
    """Install the Ctrl-C handler, unless SIGINT is ignored or has another handler. For commands only."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _CtrlC())
        # At exit, the interpreter removes handlers, but an ignored signal stays ignored.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def end_blocking_code() -> None:
    """Raise `LoopBlocked` in what the event loop of a command runs; called in another thread.

    No effect if the command does not handle Ctrl-C, see `handle`.
    """
    ctrl_c = signal.getsignal(signal.SIGINT)
    if isinstance(ctrl_c, _CtrlC) and ctrl_c.breaker is not None:
        ctrl_c.breaker.end_now()


def name_of(number: int) -> str:
    """Return a signal's name, such as ``SIGTERM``; ``signal 37`` for a real-time signal, most of which have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` like `asyncio.run`, in an event loop that every signal wakes.

    `asyncio.run` handles Ctrl-C only when its event loop wakes up: never, if the function hangs and another thread
    received the signal, or if it arrived just before the loop began to wait.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; ``main`` was cancelled and has ended.
    """
    ctrl_c = signal.getsignal(signal.SIGINT)
    if not isinstance(ctrl_c, _CtrlC):
        return asyncio.run(_awake(main))
    try:
        result = asyncio.run(_stopped_by(ctrl_c, main))
    except asyncio.CancelledError:
        # Not the cancellation of `stop`: this one is an error of `main`.
        if ctrl_c.pressed is None:
            raise
        raise KeyboardInterrupt from None
    finally:
        ctrl_c.stop = ctrl_c.breaker = None
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
    with LoopBreaker() as ctrl_c.breaker:
        return await _awake(main)


async def _awake(main: Coroutine[Any, Any, T]) -> T:
    if threading.current_thread() is not threading.main_thread():  # other threads cannot handle signals
        return await main
    # A loop with a handler for one signal is woken by all signals. SIGWINCH itself does not matter here.
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, lambda: None)
    try:
        return await main
    finally:
        # asyncio closes the descriptor that wakes the loop first: a signal would then print an error.
        loop.remove_signal_handler(signal.SIGWINCH)
