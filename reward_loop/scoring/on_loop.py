"""Run async reward functions on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from reward_loop.processes.invocation import CallOutcome, WaitClock, no_wait
from reward_loop.scoring.deadlines import Deadlines, Watched

__all__ = ["LoopCall", "LoopCalls"]


class LoopCall(Watched):
    """An async call in its own task. Its future gets the `CallOutcome`, or a `TimeoutError` at the deadline."""

    __slots__ = ("deadlines", "task")
    deadlines: Deadlines
    task: asyncio.Task[None]


class LoopCalls:
    """Runs async calls, each in its own task, with a deadline that starts with the function.

    The separate task ensures that a sample also ends at its deadline if the function swallows the cancellation, such
    as by a bare ``except:`` around a retry. `asyncio.wait` would do the same, but a sample would take a third more
    time and memory.
    """

    def __init__(self) -> None:
        self._deadlines: tuple[asyncio.AbstractEventLoop, Deadlines] | None = None
        self._abandoned: set[asyncio.Task[None]] = set()

    async def run(self, awaitable: Awaitable[Any], timeout: float | None, waited: WaitClock = no_wait) -> CallOutcome:
        """Await an awaitable that the user's code returned, and return its outcome.

        Args:
            awaitable: the awaitable.
            timeout: seconds from its start to its deadline, or ``None``.
            waited: the seconds that the call has waited for limits.

        Raises:
            TimeoutError: the deadline passed; the awaitable is cancelled.
        """
        call = self.start(lambda: awaitable, {}, timeout, waited)
        try:
            outcome: CallOutcome = await call.future
            return outcome
        finally:
            self.leave(call)

    def start(
        self,
        function: Callable[..., Awaitable[Any]],
        arguments: dict[str, Any],
        timeout: float | None,
        waited: WaitClock,
    ) -> LoopCall:
        """Start a call. The caller awaits ``call.future``, and must then call `leave`, also after a cancellation."""
        loop = asyncio.get_running_loop()
        if self._deadlines is None or self._deadlines[0] is not loop:
            self._deadlines = (loop, Deadlines(loop))
        call = LoopCall(loop.create_future(), timeout, waited)
        call.deadlines = self._deadlines[1]
        call.task = loop.create_task(_run(function, arguments, call))
        call.deadlines.watch(call)
        return call

    def leave(self, call: LoopCall) -> None:
        """Stop watching a call, and cancel it if it still runs."""
        call.deadlines.forget(call)
        if not call.task.done():
            self._abandoned.add(call.task)
            call.task.add_done_callback(self._abandoned.discard)
            call.task.cancel()


async def _run(function: Callable[..., Awaitable[Any]], arguments: dict[str, Any], call: Watched) -> None:
    """Await the function, and set its outcome on the call's future, unless the caller has abandoned the call.

    Exceptions become part of the outcome, except KeyboardInterrupt and GeneratorExit.
    """
    call.started = time.monotonic()
    started = time.perf_counter()
    value: Any = None
    exception: BaseException | None = None
    try:
        value = await function(**arguments)
    except (KeyboardInterrupt, GeneratorExit):
        call.future.cancel()
        raise
    except BaseException as error:
        exception = error
    if not call.future.done():
        call.future.set_result(CallOutcome(value, exception, time.perf_counter() - started))
