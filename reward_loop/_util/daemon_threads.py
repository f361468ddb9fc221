"""Daemon threads for sync reward functions. They block neither the event loop nor the interpreter's exit."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

_IDLE_SECONDS = 10.0


class DaemonThreads:
    """Runs at most ``max_threads`` calls at a time, each in a daemon thread.

    Invariants:

    - Calls start in order of submission.
    - An abandoned call (see `run`) releases its slot at once. Its thread cannot be killed and
      runs on outside the pool, so a hung function blocks neither other calls nor the interpreter's exit. (asyncio,
      concurrent.futures and anyio join their threads at exit.)
    - At most one thread is being woken or started at a time, and it does not interrupt the thread that wakes or starts
      it. Blocking calls still get one thread each; thousands of short calls share a few threads.
    - All calls submitted in one event loop iteration are queued together, and results are delivered in batches:
      waking a thread and switching the GIL costs more than a short call. With a plain queue, a thread for each open
      call and a wake-up of the loop for each result, `ScoringFunction` scores 13,000 samples a second with a function
      that does nothing, and 27,300 so: `benchmarks.scoring` measures it.
    """

    def __init__(self, max_threads: int) -> None:
        self.max_threads = max_threads
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        """Set the initial state. Also called in a forked child process, which has no copies of the threads."""
        self._lock = threading.Lock()
        # Used only to wait and notify. Always acquire `_lock` itself: a KeyboardInterrupt inside the condition's
        # `__enter__`, which is Python code, could leave the lock held forever.
        self._changed = threading.Condition(self._lock)
        # `_lock` guards `_queue`, `_threads`, `_idle` and `_is_adding`; only the event loop's thread uses `_submitter`.
        self._queue: deque[_Job] = deque()
        self._threads = 0
        self._idle = 0
        self._is_adding = False
        """Whether a thread is being woken or started."""
        self._submitter: _Submitter | None = None

    async def run(self, function: Callable[[], T], future: asyncio.Future[T] | None = None) -> T:
        """Call the function in a thread as soon as one is free.

        The call is abandoned if the awaiting task is cancelled, or if ``future`` gets an exception before.

        Args:
            function: the function to call, without arguments.
            future: gets the function's return value or exception; by default a new one.

        Returns:
            The function's return value. Its exceptions propagate.
        """
        loop = asyncio.get_running_loop()
        submitter = self._submitter
        if submitter is None or submitter.loop is not loop:
            # This object may outlive several loops (asyncio.run more than once).
            submitter = self._submitter = _Submitter(loop)
        future = loop.create_future() if future is None else future
        job = _Job(function, submitter, future, contextvars.copy_context())
        if not submitter.submitted:
            loop.call_soon(self._hand_over, submitter)
        submitter.submitted.append(job)
        try:
            result: T = await job.future
            return result
        finally:
            self._leave(job)

    def _hand_over(self, submitter: _Submitter) -> None:
        with self._lock:
            self._queue.extend(submitter.submitted)
            submitter.submitted.clear()
        self._add_thread()

    def _leave(self, job: _Job) -> None:
        """Abandon a job that has not ended. If it is running, its thread no longer counts as part of the pool."""
        # Without the lock: nearly all jobs have ended here.
        if job.ended:
            return
        with self._lock:
            if job.ended:
                return
            job.abandoned = True
            if job.has_started:
                self._threads -= 1
        self._add_thread()

    def _add_thread(self) -> None:
        """Wake or start one more thread, if calls are queued and no thread is being woken or started."""
        if not self._queue or self._is_adding:
            return  # read without the lock: after each change of these, this method is called again
        with self._lock:
            if not self._queue or self._is_adding or not (self._idle or self._threads < self.max_threads):
                return
            self._is_adding = True
            if self._idle:
                self._changed.notify()
                return
            self._threads += 1
        # `Thread.start` waits for the new thread, which passes the GIL to it; waiting for `gate` passes it back. So the
        # new thread continues when this one blocks or after the switch interval, as a woken one does. `_lock` is free
        # meanwhile. Otherwise, a burst of short calls would start dozens of threads, which take turns after each call.
        gate = threading.Lock()
        try:
            with gate:
                threading.Thread(target=self._work, args=(gate,), name="reward-function", daemon=True).start()
        except RuntimeError as error:  # No more threads available. Existing threads continue; without any, fail.
            with self._lock:
                self._is_adding = False
                self._threads -= 1
                if self._threads:
                    return
                jobs, self._queue = self._queue, deque()
            for job in jobs:
                job.fail(error)

    def _work(self, gate: threading.Lock) -> None:
        gate.acquire()
        with self._lock:
            self._is_adding = False
        while (job := self._take()) is not None:
            self._add_thread()
            job.run()
            with self._lock:
                job.ended = True
                if job.abandoned:
                    return
            job.submitter.report(job)
            del job  # do not keep the job alive while waiting for the next one

    def _take(self) -> _Job | None:
        with self._lock:
            while True:
                while self._queue:
                    job = self._queue.popleft()
                    if not job.abandoned:
                        job.has_started = True
                        return job
                self._idle += 1
                in_time = self._changed.wait(_IDLE_SECONDS)
                self._idle -= 1
                self._is_adding = False
                if not in_time and not self._queue:
                    self._threads -= 1
                    return None


_all: weakref.WeakSet[DaemonThreads] = weakref.WeakSet()


def _begin_all() -> None:
    for threads in list(_all):
        threads._begin()


os.register_at_fork(after_in_child=_begin_all)


@dataclass(eq=False, repr=False, slots=True)
class _Job:
    function: Callable[[], Any]
    submitter: _Submitter
    future: asyncio.Future[Any]
    context: contextvars.Context
    """Of the caller: `reward_loop.limit` and `current` look there."""
    result: Any = None
    error: BaseException | None = None
    has_started: bool = False
    ended: bool = False
    abandoned: bool = False

    def fail(self, error: BaseException) -> None:
        self.error, self.ended = error, True
        self.submitter.report(self)

    def run(self) -> None:
        try:
            self.result = self.context.run(self.function)
        # Also `SystemExit`, which would end the thread without a result.
        except BaseException as error:
            self.error = error


class _Submitter:
    """The event loop that submits jobs, with its newly submitted ones, and its ended ones to report."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.submitted: list[_Job] = []
        self._ended: deque[_Job] = deque()
        self._wake_up_scheduled = False

    def report(self, job: _Job) -> None:
        """Report an ended job, from the job's thread. One wake-up of the loop delivers all jobs ended by then."""
        self._ended.append(job)
        if not self._wake_up_scheduled:
            self._wake_up_scheduled = True
            # The loop may be closed when a hung function returns.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        self._wake_up_scheduled = False  # first: a job that ends after the last look schedules another
        while self._ended:
            job = self._ended.popleft()
            if job.future.done():
                continue
            if job.error is None:
                job.future.set_result(job.result)
            else:
                job.future.set_exception(job.error)
