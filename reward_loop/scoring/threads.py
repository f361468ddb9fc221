"""Threads for sync reward functions: never on the loop, never in the way of the interpreter's exit."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["DaemonThreads"]

T = TypeVar("T")

_IDLE_SECONDS = 10.0


class DaemonThreads:
    """At most ``max_threads`` calls at a time, each in a daemon thread.

    A call that is given up, because its deadline passed or its task was cancelled, leaves its slot at once. Its thread
    cannot be killed and runs on, as a daemon, so that a hung function blocks neither the others nor the exit. (The
    threads of asyncio, concurrent.futures and anyio are all joined at exit.)
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def run(self, function: Callable[[], T], timeout: float | None = None) -> T:
        """Call the function in a thread as soon as a slot is free.

        Raises:
            TimeoutError: ``timeout`` seconds passed since it got its slot.
        """
        loop = asyncio.get_running_loop()
        async with self._slots_of(loop):
            job = _Job(function, contextvars.copy_context(), loop, loop.create_future())
            self._start(job)
            async with asyncio.timeout(timeout):
                return await job.future

    def _slots_of(self, loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
        # A semaphore belongs to one loop, while this object may outlive several (asyncio.run more than once).
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._max_threads))
        return self._slots[1]

    def _start(self, job: _Job) -> None:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = _Worker(self._idle, self._lock)
            worker.start()
        worker.inbox.put(job)


@dataclass(slots=True)
class _Job:
    function: Callable[[], Any]
    context: contextvars.Context
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]

    def report(self, result: Any, error: BaseException | None) -> None:
        # The loop may be closed by the time that a hung function returns.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._finish, result, error)

    def _finish(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class _Worker(threading.Thread):
    def __init__(self, idle: list[_Worker], lock: threading.Lock) -> None:
        super().__init__(name="reward-function", daemon=True)
        self.inbox: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._idle = idle
        self._lock = lock

    def run(self) -> None:
        while (job := self._next()) is not None:
            result, error = None, None
            try:
                result = job.context.run(job.function)
            except BaseException as exception:
                error = exception
            with self._lock:
                self._idle.append(self)
            job.report(result, error)
            del job, result, error

    def _next(self) -> _Job | None:
        while True:
            try:
                return self.inbox.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self in self._idle:
                        self._idle.remove(self)
                        return None
