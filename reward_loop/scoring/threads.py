"""Threads for sync reward functions: never on the loop, never in the way of the interpreter's exit."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from reward_loop.scoring.deadlines import Deadlines, Watched, no_wait

__all__ = ["DaemonThreads"]

T = TypeVar("T")

_IDLE_SECONDS = 10.0


class DaemonThreads:
    """At most ``max_threads`` calls at a time, each in a daemon thread.

    A call that is given up, because its deadline passed or its task was cancelled, leaves its slot at once. Its thread
    cannot be killed and runs on, as a daemon, so that a hung function blocks neither the others nor the exit. (The
    threads of asyncio, concurrent.futures and anyio are all joined at exit.)

    Calls are started in order. A thread that has ended one takes the next from the queue, and only one more thread is
    woken at a time: calls that block still get a thread each, one after the other, while thousands of calls that do
    little share a few. Calls that come in one turn of the loop are handed over together, and so are results: waking a
    thread, and passing on the interpreter's lock, costs more than such a call.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        """Start from nothing, as in a fork of this process, where the threads are missing."""
        self._lock = threading.Lock()
        # To wait and to notify. The lock is taken by itself: a KeyboardInterrupt in the condition's own `__enter__`,
        # which is Python code, would leave it locked for ever.
        self._changed = threading.Condition(self._lock)
        # All of these under the lock.
        self._queue: deque[_Job] = deque()
        self._threads = 0
        self._idle = 0
        self._coming = False
        self._home: _Home | None = None

    async def run(
        self,
        function: Callable[[], T],
        timeout: float | None = None,
        waited: Callable[[float], float] = no_wait,
    ) -> T:
        """Call the function in a thread as soon as one is free.

        Args:
            function: what to call.
            timeout: seconds from its start to its deadline.
            waited: how many seconds up to the given `time.monotonic` do not count towards the deadline.

        Raises:
            TimeoutError: the deadline passed.
        """
        loop = asyncio.get_running_loop()
        home = self._home
        if home is None or home.loop is not loop:
            # This object may outlive several loops (asyncio.run more than once).
            home = self._home = _Home(loop)
        job = _Job(function, home, waited)
        if not home.submitted:
            loop.call_soon(self._hand_over, home)
        home.submitted.append(job)
        if timeout is not None:
            home.deadlines.watch(job, timeout)
        try:
            return await job.future
        finally:
            if timeout is not None:
                home.deadlines.forget(job, timeout)
            self._leave(job)

    def _hand_over(self, home: _Home) -> None:
        with self._lock:
            self._queue.extend(home.submitted)
            home.submitted.clear()
            self._call_for_help()

    def _leave(self, job: _Job) -> None:
        """Nobody waits for the job any more. If it still runs, its thread is no longer one of ours."""
        if job.ended:
            return
        with self._lock:
            if job.ended:
                return
            job.given_up = True
            if job.started is not None:
                self._threads -= 1
                self._call_for_help()

    def _call_for_help(self) -> None:
        """Let one more thread come, if there is work for it and none is on its way."""
        if not self._queue or self._coming:
            return
        if self._idle:
            self._coming = True
            self._changed.notify()
        elif self._threads < self._max_threads:
            self._coming = True
            self._threads += 1
            try:
                threading.Thread(target=self._work, name="reward-function", daemon=True).start()
            except RuntimeError as error:  # The system has no more threads for us; those that there are do the work.
                self._coming = False
                self._threads -= 1
                if not self._threads:
                    for job in self._queue:
                        job.fail(error)
                    self._queue.clear()

    def _work(self) -> None:
        with self._lock:
            self._coming = False
        while (job := self._take()) is not None:
            job.run()
            with self._lock:
                job.ended = True
                if job.given_up:
                    return
            job.home.report(job)
            del job  # not kept alive until the next one comes

    def _take(self) -> _Job | None:
        with self._lock:
            while True:
                while self._queue:
                    job = self._queue.popleft()
                    if not job.given_up:
                        job.started = time.monotonic()
                        self._call_for_help()
                        return job
                self._idle += 1
                in_time = self._changed.wait(_IDLE_SECONDS)
                self._idle -= 1
                self._coming = False
                if not in_time and not self._queue:
                    self._threads -= 1
                    return None


_all: weakref.WeakSet[DaemonThreads] = weakref.WeakSet()


def _begin_all() -> None:
    for threads in list(_all):
        threads._begin()


os.register_at_fork(after_in_child=_begin_all)


class _Job(Watched):
    __slots__ = ("context", "ended", "error", "function", "given_up", "home", "result")

    def __init__(self, function: Callable[[], Any], home: _Home, waited: Callable[[float], float]) -> None:
        super().__init__(home.loop.create_future(), waited)
        self.function = function
        self.home = home
        self.context = contextvars.copy_context()
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = False
        self.given_up = False

    def fail(self, error: BaseException) -> None:
        self.error, self.ended = error, True
        self.home.report(self)

    def run(self) -> None:
        try:
            self.result = self.context.run(self.function)
        except BaseException as error:
            self.error = error


class _Home:
    """A loop, what it is still to be told, and the deadlines of the calls that it waits for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.submitted: list[_Job] = []
        self._ended: deque[_Job] = deque()
        self._told = False
        self.deadlines = Deadlines(loop)

    def report(self, job: _Job) -> None:
        """Called in the job's thread. One wake-up of the loop serves all that ends until it comes."""
        self._ended.append(job)
        if not self._told:
            self._told = True
            # The loop may be closed by the time that a hung function returns.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        self._told = False
        while self._ended:
            job = self._ended.popleft()
            if job.future.done():
                continue
            if job.error is None:
                job.future.set_result(job.result)
            else:
                job.future.set_exception(job.error)
