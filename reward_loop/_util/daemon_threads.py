"""Daemon threads for sync reward functions. They block neither the event loop nor the interpreter's exit."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

__all__ = ["DaemonThreads"]

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
        self._pid = 0

    def _begin(self) -> None:
        """Set the initial state: at the first call of this process, since a forked one has no copies of the threads."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Used only to wait and notify. Always acquire `_lock` itself: a KeyboardInterrupt inside the condition's
        # `__enter__`, which is Python code, could leave the lock held forever.
        self._changed = threading.Condition(self._lock)
        # `_lock` guards `_queue`, `_threads`, `_idle` and `_is_adding`; only the event loop's thread uses `_submitter`.
        self._queue: deque[_Job] = deque()
        self._threads = self._idle = 0
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
        if self._pid != os.getpid():
            self._begin()
        loop = asyncio.get_running_loop()
        submitter = self._submitter
        if submitter is None or submitter.loop is not loop:
            # This object may outlive several loops (asyncio.run more than once).
            submitter = self._submitter = _Submitter(loop)
        future = loop.create_future() if future is None else future
        # The context of the caller: `reward_loop.limit` and `current` look there.
        job = _Job(partial(contextvars.copy_context().run, function), submitter, future)
        if not submitter.submitted:
            loop.call_soon(self._hand_over, submitter)
        submitter.submitted.append(job)
        try:
            return await future
        finally:
            if not job.ended:  # without the lock: nearly all jobs have ended here
                self._abandon(job)

    def _hand_over(self, submitter: _Submitter) -> None:
        with self._lock:
            self._queue.extend(submitter.submitted)
            submitter.submitted.clear()
        self._add_thread()

    def _abandon(self, job: _Job) -> None:
        """Abandon a job that has not ended. If it is running, its thread no longer counts as part of the pool."""
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
                jobs: deque[_Job] = deque()
                if not self._threads:
                    jobs, self._queue = self._queue, jobs
            for job in jobs:
                job.end(partial(job.future.set_exception, error))

    def _work(self, gate: threading.Lock) -> None:
        gate.acquire()
        with self._lock:
            self._is_adding = False
        while (job := self._take()) is not None:
            self._add_thread()
            try:
                deliver = partial(job.future.set_result, job.function())
            # Also `SystemExit`, which would end the thread without a result.
            except BaseException as error:
                deliver = partial(job.future.set_exception, error)
            with self._lock:
                job.ended = True
                if job.abandoned:
                    return
            job.end(deliver)
            del job, deliver  # do not keep them alive while waiting for the next one

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


@dataclass(eq=False, repr=False, slots=True)
class _Job:
    function: Callable[[], Any]
    submitter: _Submitter
    future: asyncio.Future[Any]
    has_started: bool = False
    ended: bool = False
    abandoned: bool = False

    def end(self, deliver: Callable[[], None]) -> None:
        """Have the loop set the outcome on the future. One wake-up of the loop delivers all jobs ended by then."""
        self.ended = True
        submitter = self.submitter
        submitter.ended.append((self.future, deliver))
        if not submitter.is_woken:
            submitter.is_woken = True
            # The loop may be closed when a hung function returns.
            with contextlib.suppress(RuntimeError):
                submitter.loop.call_soon_threadsafe(submitter.deliver)


class _Submitter:
    """The event loop that submits jobs, with its newly submitted ones, and the outcomes of ended ones to deliver."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.submitted: list[_Job] = []
        self.ended: deque[tuple[asyncio.Future[Any], Callable[[], None]]] = deque()
        self.is_woken = False

    def deliver(self) -> None:
        self.is_woken = False  # first: a job that ends after the last look schedules another
        while self.ended:
            future, deliver = self.ended.popleft()
            if not future.done():
                deliver()
