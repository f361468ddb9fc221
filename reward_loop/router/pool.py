"""The servers behind the router: which of them can take a request, and which one takes the next."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Container, Iterable
from types import TracebackType
from typing import Self

from reward_loop.errors import ServerError
from reward_loop.router.backend import Worker, WorkerState
from reward_loop.router.config import RequestKind, RouterConfig, WorkerConfig
from reward_loop.router.http_client import ConnectError, Upstream
from reward_loop.router.policies import Policy, policy_for

__all__ = ["AllRestError", "AsleepError", "Group", "NoWorkerError", "WorkerPool"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0

_TRIAL_S = 5.0
"""A server on trial whose first request takes longer than this is taken to be well."""


class NoWorkerError(ServerError):
    """No server will take requests, now or later."""


class AllRestError(ServerError):
    """Every server that could take the request has asked for a pause."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds
        """Until the first one is back."""


class AsleepError(ServerError):
    """The server is well, and its engine sleeps: what it is asked now hangs."""


class Group:
    """The servers that can answer the same requests."""

    __slots__ = ("members", "policy", "ready", "trials")

    def __init__(self, members: list[Worker], policy: Policy) -> None:
        self.members = members
        self.policy = policy
        awake = [worker for worker in members if not worker.resting]
        self.ready = [worker for worker in awake if worker.state is WorkerState.UP]
        self.trials = [worker for worker in awake if worker.state is WorkerState.TRIAL]


class WorkerPool:
    """Hands out servers, and takes failing ones out of use until they are well again.

    An async context manager: between entry and exit, servers that are down are checked with growing pauses, and those
    in use at an interval.

    Args:
        workers: the servers.
        check: asks one for its health; raises if it is not well. It may set the worker's `models` and `cards`. A server
            in the making that already has its socket may answer only when it is ready.
        config: options.
    """

    def __init__(
        self,
        workers: Iterable[WorkerConfig],
        check: Callable[[Worker], Awaitable[None]],
        config: RouterConfig | None = None,
    ) -> None:
        self._config = config or RouterConfig()
        self._check = check
        self.workers: list[Worker] = []
        self.models: frozenset[str] = frozenset()
        """All that are known."""
        self.several_models = False
        """Whether it matters which model a request names."""
        self._initial = list(workers)
        self._groups: dict[tuple[str | None, RequestKind | None], Group] = {}
        # One for each group: models that are asked alternately would always meet every other server of a common turn.
        self._policies: defaultdict[tuple[str | None, RequestKind | None], Policy] = defaultdict(
            lambda: policy_for(self._config)
        )
        self._changed = asyncio.Event()
        self._watches: dict[Worker, asyncio.Task[None]] = {}
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for config in self._initial:
            self.add(config)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in list(self._watches.values()):
            task.cancel()
        await self._tasks.__aexit__(None, None, None)
        for worker in self.workers:
            worker.upstream.close()

    @property
    def usable(self) -> bool:
        """Whether a request would find a server at once."""
        return any(worker.state in (WorkerState.UP, WorkerState.TRIAL) for worker in self.workers)

    def group(self, model: str | None = None, kind: RequestKind | None = None) -> Group:
        """The servers that can answer a model's requests of a kind; ``None`` stands for any."""
        if model is not None and model not in self.models:
            model = ""  # Only servers whose models are not known can have it.
        group = self._groups.get((model, kind))
        if group is None:
            members = [worker for worker in self.workers if worker.can_answer(model, kind)]
            group = self._groups[model, kind] = Group(members, self._policies[model, kind])
        return group

    def pick(self, group: Group, key: int = 0, avoid: Container[Worker] = ()) -> Worker | None:
        """A server that takes a request now, if there is one, other than those to avoid."""
        for worker in group.trials:
            if worker in avoid:
                continue
            if not worker.in_flight:
                worker.trial_until = time.monotonic() + _TRIAL_S
                return worker
            if time.monotonic() > worker.trial_until:
                self._set_state(worker, WorkerState.UP)
                return worker
        ready = [worker for worker in group.ready if worker not in avoid] if avoid else group.ready
        if ready:
            return group.policy.choose(ready, key)
        # Better one that is on trial than none.
        return next((worker for worker in group.trials if worker not in avoid), None)

    async def acquire(
        self, model: str | None = None, kind: RequestKind | None = None, key: int = 0, avoid: Container[Worker] = ()
    ) -> Worker:
        """A server for a request, one to avoid only if there is no other; waits while all are down.

        Raises:
            NoWorkerError: all are retired, drained or gone.
            AllRestError: those that are up have asked for a pause.
        """
        while True:
            group = self.group(model, kind)
            worker = self.pick(group, key, avoid) or self.pick(group, key)
            if worker:
                return worker
            if all(worker.state in (WorkerState.RETIRED, WorkerState.DRAINING) for worker in group.members):
                raise NoWorkerError(f"no reward model server is left: {self.describe(group.members)}")
            resting = [worker.rests_until for worker in group.members if worker.resting]
            if resting:
                message = f"all servers have asked for a pause: {self.describe(group.members)}"
                raise AllRestError(message, min(resting) - time.monotonic())
            await self._changed.wait()

    # What becomes of a server

    def succeeded(self, worker: Worker) -> None:
        """It has answered."""
        worker.failures = 0
        if worker.state is WorkerState.TRIAL:
            worker.relapses = 0
            self._set_state(worker, WorkerState.UP)

    def failed(self, worker: Worker, reason: str) -> None:
        """It has answered with a 5xx."""
        worker.failures += 1
        if worker.failures >= self._config.max_failures or worker.state is WorkerState.TRIAL:
            self.eject(worker, f"{worker.failures} failures in a row, the last one: {reason}")

    def rest(self, worker: Worker, seconds: float) -> None:
        """Gives it no requests for some time, as it has asked for."""
        until = time.monotonic() + seconds
        if until > worker.rests_until:
            worker.rests_until = until
            # A little later, so that the time has certainly come.
            asyncio.get_running_loop().call_later(seconds + 0.001, self._refresh)
        self._refresh()

    def eject(self, worker: Worker, reason: str) -> None:
        """Takes it out of use until a check succeeds."""
        if worker.state in (WorkerState.UP, WorkerState.TRIAL):
            logger.warning("worker %s is down: %s", worker.url, reason)
            worker.relapses = worker.relapses + 1 if worker.state is WorkerState.TRIAL else 0
            worker.failures = 0
            worker.last_error = reason
            worker.stats.ejections += 1
            self._set_state(worker, WorkerState.DOWN)
            worker.taken_out.set()

    def bury(self, worker: Worker, reason: str) -> None:
        """Ejects a server whose process is known to be dead, so that what waits for its answer is tried elsewhere.

        A connection that the process had not accepted yet does not break: it would wait for the next process.
        """
        self.eject(worker, reason)
        worker.last_error = reason
        worker.upstream.break_off(reason)

    def retire(self, worker: Worker, reason: str) -> None:
        """Takes it out of use for good."""
        logger.error("worker %s is given up: %s", worker.url, reason)
        worker.last_error = reason
        self._stop_watching(worker)
        self._set_state(worker, WorkerState.RETIRED)
        worker.upstream.break_off(reason)

    def find(self, url: str) -> Worker | None:
        """The server at a URL."""
        url = url.rstrip("/")
        return next((worker for worker in self.workers if worker.url == url), None)

    def add(self, config: WorkerConfig) -> Worker:
        """Adds a server; it gets requests once it is well."""
        worker = Worker(config, Upstream(config.url, api_key=self._config.worker_api_key), models=config.models)
        self.workers.append(worker)
        self._watch(worker)
        self._refresh()
        return worker

    def drain(self, worker: Worker) -> None:
        """Gives it no new requests."""
        if worker.state is not WorkerState.RETIRED:
            logger.info("worker %s is draining", worker.url)
            self._stop_watching(worker)
            self._set_state(worker, WorkerState.DRAINING)

    async def sleep(self, worker: Worker) -> None:
        """Gives it no new requests until it is resumed, and waits until those that it has are finished, or it is."""
        if worker.state is not WorkerState.RETIRED:
            logger.info("worker %s is to sleep", worker.url)
            self._stop_watching(worker)
            self._set_state(worker, WorkerState.ASLEEP)
            worker.idle.clear()
            if worker.in_flight:
                await worker.idle.wait()

    def resume(self, worker: Worker) -> None:
        """Takes a sleeping server into use again, which its owner has woken; a drained or retired one once it is well.

        If those that were woken together were checked one by one, the first would get all that waits.
        """
        if worker.state in (WorkerState.DRAINING, WorkerState.ASLEEP, WorkerState.RETIRED):
            worker.relapses = 0
            self._set_state(worker, WorkerState.UP if worker.state is WorkerState.ASLEEP else WorkerState.DOWN)
            self._watch(worker)

    def remove(self, worker: Worker) -> None:
        """Drains it and forgets it; the requests that it has are finished."""
        self._stop_watching(worker)
        self.workers.remove(worker)
        self._set_state(worker, WorkerState.RETIRED)
        logger.info("worker %s is removed, with %d requests in flight", worker.url, worker.in_flight)

    def describe(self, workers: Iterable[Worker] | None = None) -> str:
        """The servers with their states and last errors, for messages."""
        described = [
            f"{worker.url} is {'resting' if worker.resting else worker.state}"
            + (f" ({worker.last_error})" if worker.last_error else "")
            for worker in (self.workers if workers is None else workers)
        ]
        return "; ".join(described) or "none was configured"

    def _watch(self, worker: Worker) -> None:
        worker.taken_out.set()
        self._watches[worker] = self._tasks.create_task(self._look_after(worker), name=f"watch-{worker.url}")

    def _stop_watching(self, worker: Worker) -> None:
        if watch := self._watches.pop(worker, None):
            watch.cancel()

    async def _look_after(self, worker: Worker) -> None:
        new = True
        while True:
            if worker.state is not WorkerState.UP:
                await self._readmit(worker, new)
            new = False
            worker.taken_out.clear()
            while not worker.taken_out.is_set():
                try:
                    # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the event.
                    async with asyncio.timeout(self._config.health_interval_s):
                        await worker.taken_out.wait()
                except TimeoutError:
                    await self._check_in_use(worker)

    async def _readmit(self, worker: Worker, new: bool) -> None:
        """Checks a server that is down until it is well."""
        pause = _FIRST_PAUSE_S
        if worker.relapses:
            pause = min(_FIRST_PAUSE_S * 2**worker.relapses, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause)
        while (error := await self._run_check(worker)) is not None:
            worker.last_error = error[0]
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        logger.info("worker %s is up", worker.url)
        worker.failed_checks = 0
        worker.trial_until = time.monotonic() + _TRIAL_S
        self._set_state(worker, WorkerState.UP if new else WorkerState.TRIAL)

    async def _check_in_use(self, worker: Worker) -> None:
        error = await self._run_check(worker)
        if error is None:
            worker.failed_checks = 0
            return
        reason, certain = error
        worker.failed_checks += 1
        if certain or worker.failed_checks >= self._config.max_failed_checks:
            self.eject(worker, reason)

    async def _run_check(self, worker: Worker) -> tuple[str, bool] | None:
        """What is wrong with a server, and whether it is certainly of no use, or ``None`` if it is well."""
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                await self._check(worker)
        except TimeoutError:
            return f"no answer to a health check within {self._config.health_timeout_s:g} s", False
        except Exception as error:
            return f"{type(error).__name__}: {error}", isinstance(error, ConnectError | AsleepError)
        return None

    def _set_state(self, worker: Worker, state: WorkerState) -> None:
        worker.state = state
        if state is not WorkerState.ASLEEP:
            worker.idle.set()
        self._refresh()

    def _refresh(self) -> None:
        """Takes note of any change, and wakes those who wait for one."""
        named = {frozenset(worker.models) for worker in self.workers if worker.models}
        self.models = frozenset().union(*named)
        self.several_models = len(named) > 1
        self._groups.clear()
        self._changed.set()
        self._changed = asyncio.Event()
