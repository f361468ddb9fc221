"""The servers behind the router: which of them can take a request, and which one takes the next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self

import anyio

from reward_loop.errors import ServerError

__all__ = ["NoWorkerError", "Worker", "WorkerPool", "WorkerState"]

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 5.0


class WorkerState(StrEnum):
    """What the router knows about a server."""

    DOWN = "down"
    """Not in use: it is being asked for its health until it answers."""
    UP = "up"
    """In use."""
    RETIRED = "retired"
    """Never to be used again."""


class NoWorkerError(ServerError):
    """Every worker is retired."""


@dataclass(slots=True, eq=False)
class Worker:
    """One server."""

    url: str
    """``http://host:port``"""
    state: WorkerState = WorkerState.DOWN
    last_error: str | None = None
    """Why it was last taken out of use, or why its latest probe failed."""
    requests: int = 0
    """How many requests it was given."""
    attempts: set[anyio.CancelScope] = field(default_factory=set)
    """The requests that it has not begun to answer."""


class WorkerPool:
    """Hands out workers in turn, and takes failing ones out of use until they are well again.

    An async context manager: between entry and exit, each worker that is down is probed, with growing pauses.

    Args:
        urls: the servers, ``http://host:port`` each.
        probe: asks a server for its health; raises if it is not well. It may take as long as it likes: a server in
            the making that already has its socket answers when it is ready.
    """

    def __init__(self, urls: Iterable[str], probe: Callable[[str], Awaitable[None]]) -> None:
        self.workers = [Worker(url) for url in urls]
        self._probe = probe
        self._turn = 0
        self._changed = asyncio.Event()
        self._probes: dict[Worker, asyncio.Task[None]] = {}
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for worker in self.workers:
            self._start_probing(worker)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._probes.values():
            task.cancel()
        await self._tasks.__aexit__(None, None, None)

    @property
    def usable(self) -> bool:
        """Whether a request would find a worker at once."""
        return any(worker.state is WorkerState.UP for worker in self.workers)

    async def acquire(self) -> Worker:
        """The next worker in turn; waits while all of them are down.

        Raises:
            NoWorkerError: all are retired.
        """
        while True:
            up = [worker for worker in self.workers if worker.state is WorkerState.UP]
            if up:
                self._turn += 1
                worker = up[self._turn % len(up)]
                worker.requests += 1
                return worker
            if all(worker.state is WorkerState.RETIRED for worker in self.workers):
                raise NoWorkerError(f"no reward model server is left: {self.describe()}")
            await self._changed.wait()

    def eject(self, worker: Worker, reason: str) -> None:
        """Takes a worker out of use until a probe succeeds."""
        if worker.state is WorkerState.UP:
            logger.warning("worker %s is down: %s", worker.url, reason)
            worker.state = WorkerState.DOWN
            worker.last_error = reason
            self._start_probing(worker)

    def bury(self, worker: Worker, reason: str) -> None:
        """Ejects a worker whose process is known to be dead, so that what waits for its answer is tried elsewhere.

        A connection that the process had not accepted yet does not break: it would wait for the next process.
        """
        self.eject(worker, reason)
        worker.last_error = reason
        for attempt in worker.attempts:
            attempt.cancel()

    def retire(self, worker: Worker, reason: str) -> None:
        """Takes a worker out of use for good."""
        logger.error("worker %s is given up: %s", worker.url, reason)
        worker.state = WorkerState.RETIRED
        worker.last_error = reason
        if probe := self._probes.get(worker):
            probe.cancel()
        for attempt in worker.attempts:
            attempt.cancel()
        self._wake()

    def describe(self) -> str:
        """The workers with their states and last errors, for messages."""
        described = [
            f"{worker.url} is {worker.state}" + (f" ({worker.last_error})" if worker.last_error else "")
            for worker in self.workers
        ]
        return "; ".join(described) or "none was configured"

    def _start_probing(self, worker: Worker) -> None:
        task = self._tasks.create_task(self._readmit(worker), name=f"probe-{worker.url}")
        self._probes[worker] = task

    async def _readmit(self, worker: Worker) -> None:
        pause = _FIRST_RETRY_S
        while True:
            try:
                await self._probe(worker.url)
            except Exception as error:
                worker.last_error = f"{type(error).__name__}: {error}"
            else:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_RETRY_S)
        logger.info("worker %s is up", worker.url)
        worker.state = WorkerState.UP
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
