"""Run async reward functions on the event loop, each in its own task.

The separate task ensures that a sample also ends at its deadline if the function swallows the cancellation, such as by
a bare ``except:`` around a retry. `asyncio.wait` would do the same, but a sample would take a third more time and
memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from reward_loop.limits.call import Call
from reward_loop.processes.outcome import CallOutcome

__all__ = ["cancel", "start"]

_abandoned: set[asyncio.Task[None]] = set()
"""The cancelled tasks that have not ended yet."""


def start(call: Call, function: Callable[..., Awaitable[Any]], arguments: Mapping[str, Any]) -> asyncio.Task[None]:
    """Start a function; its `CallOutcome` becomes the result of ``call.future``. `cancel` the task afterwards."""
    return call.loop.create_task(_run(call, function, arguments))


def cancel(task: asyncio.Task[None]) -> None:
    """Cancel a task of `start` if it still runs, and keep it until it has ended."""
    if not task.done():
        _abandoned.add(task)
        task.add_done_callback(_abandoned.discard)
        task.cancel()


async def _run(call: Call, function: Callable[..., Awaitable[Any]], arguments: Mapping[str, Any]) -> None:
    """Await the function, and set its outcome on the call's future, unless the caller has abandoned the call.

    Exceptions become part of the outcome, except KeyboardInterrupt and GeneratorExit.
    """
    call.begin()
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
