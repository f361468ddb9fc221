"""The servers behind the router: which of them can take a request, and which one takes the next."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Container, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from reward_loop.errors import ServerError
from reward_loop.router.backend import Backend, BackendState
from reward_loop.router.config import BackendConfig, RequestKind, RouterConfig
from reward_loop.router.http_client import ConnectError, Upstream
from reward_loop.router.policies import Policy, policy_for

__all__ = ["AllCoolingDownError", "AsleepError", "BackendPool", "Group", "LoopError", "NoBackendError"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0

_TRIAL_S = 5.0
"""A server on trial whose first request takes longer than this is taken to be well."""

_START_CHECK_S = 30.0
"""A check of a server that is not in use may take this long, or `health_timeout_s` if that is longer: a server that is
starting may accept connections and answer only when it is ready."""


class NoBackendError(ServerError):
    """No server will take requests, now or later."""


class AllCoolingDownError(ServerError):
    """Every server that could take the request has asked for a pause."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds
        """Until the first one is back."""


class LoopError(ServerError):
    """The server is this router itself."""


class AsleepError(ServerError):
    """The server is well, and its engine sleeps: what it is asked now hangs."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """A health check that failed."""

    reason: str
    certain: bool = False
    """Whether one such failure is enough to take the server out of use."""
    timed_out: bool = False
    loop: bool = False
    """Whether the server is this router."""


def _ignore(backend: Backend) -> None:
    pass


class Group:
    """The servers that can answer the same requests."""

    __slots__ = ("members", "policy", "ready", "trials")

    def __init__(self, members: list[Backend], policy: Policy) -> None:
        self.members = members
        self.policy = policy
        awake = [backend for backend in members if not backend.cooling_down]
        self.ready = [backend for backend in awake if backend.state is BackendState.UP]
        self.trials = [backend for backend in awake if backend.state is BackendState.TRIAL]


class BackendPool:
    """Hands out servers, and takes failing ones out of use until they are well again.

    An async context manager: between entry and exit, servers that are down are checked with growing pauses, and those
    in use at an interval.

    Args:
        backends: the servers.
        check: sends a health request to one; raises if it is unhealthy. It may set the backend's `models` and `cards`.
            A server that is starting and already has its socket may answer only when it is ready.
        config: options.
    """

    def __init__(
        self,
        backends: Iterable[BackendConfig],
        check: Callable[[Backend], Awaitable[None]],
        config: RouterConfig | None = None,
    ) -> None:
        self._config = config or RouterConfig()
        self._check = check
        self.backends: list[Backend] = []
        self.models: frozenset[str] = frozenset()
        """All that are known."""
        self.several_models = False
        """Whether it matters which model a request names."""
        self.identity = b"reward-loop-" + secrets.token_hex(8).encode()
        """The router's name in ``Via`` headers: a request that carries it goes round in a loop."""
        self._initial = list(backends)
        self._groups: dict[tuple[str | None, RequestKind | None], Group] = {}
        # One for each group: models that are asked alternately would always meet every other server of a common turn.
        self._policies: defaultdict[tuple[str | None, RequestKind | None], Policy] = defaultdict(
            lambda: policy_for(self._config)
        )
        self.on_frozen: Callable[[Backend], None] = _ignore
        """Called with a server whose health checks time out: when it is taken out of use, and after each further check
        that times out."""
        self._changed = asyncio.Event()
        self._watches: dict[Backend, asyncio.Task[None]] = {}
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
        for backend in self.backends:
            backend.upstream.close()

    @property
    def usable(self) -> bool:
        """Whether a request would find a server at once."""
        return any(backend.state in (BackendState.UP, BackendState.TRIAL) for backend in self.backends)

    def group(self, model: str | None = None, kind: RequestKind | None = None) -> Group:
        """The servers that can answer a model's requests of a kind; ``None`` stands for any."""
        if model is not None and model not in self.models:
            model = ""  # Only servers whose models are not known can have it.
        group = self._groups.get((model, kind))
        if group is None:
            members = [backend for backend in self.backends if backend.can_answer(model, kind)]
            group = self._groups[model, kind] = Group(members, self._policies[model, kind])
        return group

    def pick(self, group: Group, key: int = 0, avoid: Container[Backend] = ()) -> Backend | None:
        """A server that takes a request now, if there is one, other than those to avoid."""
        for backend in group.trials:
            if backend in avoid:
                continue
            if not backend.in_flight:
                backend.trial_until = time.monotonic() + _TRIAL_S
                return backend
            if time.monotonic() > backend.trial_until:
                self._set_state(backend, BackendState.UP)
                return backend
        ready = [backend for backend in group.ready if backend not in avoid] if avoid else group.ready
        if ready:
            return group.policy.choose(ready, key)
        # Better one that is on trial than none.
        return next((backend for backend in group.trials if backend not in avoid), None)

    async def acquire(
        self, model: str | None = None, kind: RequestKind | None = None, key: int = 0, avoid: Container[Backend] = ()
    ) -> Backend:
        """A server for a request, one to avoid only if there is no other; waits while all are down.

        Raises:
            NoBackendError: all are retired, drained or gone.
            AllCoolingDownError: those that are up have asked for a pause.
        """
        while True:
            group = self.group(model, kind)
            backend = self.pick(group, key, avoid) or self.pick(group, key)
            if backend:
                return backend
            if all(backend.state in (BackendState.GIVEN_UP, BackendState.DRAINING) for backend in group.members):
                raise NoBackendError(f"no reward model server is left: {self.describe(group.members)}")
            cooling = [backend.cools_down_until for backend in group.members if backend.cooling_down]
            if cooling:
                message = f"all servers have asked for a pause: {self.describe(group.members)}"
                raise AllCoolingDownError(message, min(cooling) - time.monotonic())
            await self._changed.wait()

    # What becomes of a server

    def succeeded(self, backend: Backend) -> None:
        """It has answered."""
        backend.failures = 0
        if backend.state is BackendState.TRIAL:
            backend.relapses = 0
            self._set_state(backend, BackendState.UP)

    def failed(self, backend: Backend, reason: str) -> None:
        """It has answered with a 5xx."""
        backend.failures += 1
        if backend.failures >= self._config.max_failures or backend.state is BackendState.TRIAL:
            self.mark_unhealthy(backend, f"{backend.failures} failures in a row, the last one: {reason}")

    def cool_down(self, backend: Backend, seconds: float) -> None:
        """Gives it no requests for some time, as it has asked for."""
        until = time.monotonic() + seconds
        if until > backend.cools_down_until:
            backend.cools_down_until = until
            # A little later, so that the time has certainly come.
            asyncio.get_running_loop().call_later(seconds + 0.001, self._refresh)
        self._refresh()

    def mark_unhealthy(self, backend: Backend, reason: str) -> None:
        """Takes it out of use until a check succeeds."""
        if backend.state in (BackendState.UP, BackendState.TRIAL):
            logger.warning("backend %s is down: %s", backend.url, reason)
            backend.relapses = backend.relapses + 1 if backend.state is BackendState.TRIAL else 0
            backend.failures = 0
            backend.last_error = reason
            backend.stats.ejections += 1
            self._set_state(backend, BackendState.DOWN)
            backend.taken_out.set()

    def mark_dead(self, backend: Backend, reason: str) -> None:
        """Takes a server out of use whose process has died. Requests that wait for its answer are tried elsewhere.

        A connection that the process had not accepted yet does not break: it would wait for the next process.
        """
        self.mark_unhealthy(backend, reason)
        backend.frozen = False
        backend.last_error = reason
        backend.upstream.break_off(reason)

    def give_up(self, backend: Backend, reason: str) -> None:
        """Takes it out of use for good."""
        logger.error("backend %s gets no more requests: %s", backend.url, reason)
        backend.last_error = reason
        self._stop_watching(backend)
        self._set_state(backend, BackendState.GIVEN_UP)
        backend.upstream.break_off(reason)

    def has_stand_in(self, backend: Backend) -> bool:
        """Whether another server can take a server's requests now."""
        return any(
            other is not backend
            and other.state in (BackendState.UP, BackendState.TRIAL)
            and not other.cooling_down
            and set(other.models) == set(backend.models)
            and (other.config.kind, other.config.engine) == (backend.config.kind, backend.config.engine)
            for other in self.backends
        )

    def find(self, url: str) -> Backend | None:
        """The server at a URL."""
        url = url.rstrip("/")
        return next((backend for backend in self.backends if backend.url == url), None)

    def add(self, config: BackendConfig) -> Backend:
        """Adds a server; it gets requests once it is well."""
        backend = Backend(config, self.connect(config.url), models=config.models)
        self.backends.append(backend)
        self._watch(backend)
        self._refresh()
        return backend

    def connect(self, url: str) -> Upstream:
        """An HTTP client of a server, which sends the servers' API key and this router's identity."""
        return Upstream(url, api_key=self._config.worker_api_key, via=self.identity)

    def drain(self, backend: Backend) -> None:
        """Gives it no new requests."""
        if backend.state is not BackendState.GIVEN_UP:
            logger.info("backend %s is draining", backend.url)
            self._stop_watching(backend)
            self._set_state(backend, BackendState.DRAINING)

    async def sleep(self, backend: Backend) -> None:
        """Gives it no new requests until it is resumed, and waits until those that it has are finished, or it is."""
        if backend.state is not BackendState.GIVEN_UP:
            logger.info("backend %s is to sleep", backend.url)
            self._stop_watching(backend)
            self._set_state(backend, BackendState.ASLEEP)
            backend.idle.clear()
            if backend.in_flight:
                await backend.idle.wait()

    def resume(self, backend: Backend) -> None:
        """Takes a sleeping server into use again, which its owner has woken; a drained or retired one once it is well.

        If those that were woken together were checked one by one, the first would get all that waits.
        """
        if backend.state in (BackendState.DRAINING, BackendState.ASLEEP, BackendState.GIVEN_UP):
            backend.relapses = 0
            self._set_state(backend, BackendState.UP if backend.state is BackendState.ASLEEP else BackendState.DOWN)
            self._watch(backend)

    def remove(self, backend: Backend) -> None:
        """Drains it and forgets it; the requests that it has are finished."""
        self._stop_watching(backend)
        self.backends.remove(backend)
        self._set_state(backend, BackendState.GIVEN_UP)
        logger.info("backend %s is removed, with %d requests in flight", backend.url, backend.in_flight)

    def describe(self, backends: Iterable[Backend] | None = None) -> str:
        """The servers with their states and last errors, for messages."""
        described = [
            f"{backend.url} is {'resting' if backend.cooling_down else backend.state}"
            + (f" ({backend.last_error})" if backend.last_error else "")
            for backend in (self.backends if backends is None else backends)
        ]
        return "; ".join(described) or "none was configured"

    def _watch(self, backend: Backend) -> None:
        backend.taken_out.set()
        self._watches[backend] = self._tasks.create_task(self._look_after(backend), name=f"watch-{backend.url}")

    def _stop_watching(self, backend: Backend) -> None:
        if watch := self._watches.pop(backend, None):
            watch.cancel()

    async def _look_after(self, backend: Backend) -> None:
        new = True
        while True:
            if backend.state is not BackendState.UP:
                await self._readmit(backend, new)
            new = False
            backend.taken_out.clear()
            while not backend.taken_out.is_set():
                try:
                    # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the event.
                    async with asyncio.timeout(self._config.health_interval_s):
                        await backend.taken_out.wait()
                except TimeoutError:
                    while await self._check_in_use(backend) and not backend.taken_out.is_set():
                        pass  # The check has taken its time already: the next one follows at once.

    async def _readmit(self, backend: Backend, new: bool) -> None:
        """Checks a server that is down until it is well."""
        pause = _FIRST_PAUSE_S
        if backend.relapses:
            pause = min(_FIRST_PAUSE_S * 2**backend.relapses, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause)
        while failure := await self._run_check(backend):
            if failure.loop:
                self.give_up(backend, failure.reason)
                return
            backend.last_error = failure.reason
            if failure.timed_out and backend.in_flight:
                backend.frozen = True
            if backend.frozen:
                # The budget of retries has grown since, or another server is well again.
                self.on_frozen(backend)
            await asyncio.sleep(min(pause, self._config.health_interval_s) if backend.frozen else pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        logger.info("backend %s is up", backend.url)
        backend.failed_checks = 0
        backend.frozen = False
        backend.trial_until = time.monotonic() + _TRIAL_S
        self._set_state(backend, BackendState.UP if new else BackendState.TRIAL)

    async def _check_in_use(self, backend: Backend) -> bool:
        """Checks a server in use; returns whether the check timed out while the server sent nothing at all."""
        reads = backend.upstream.reads
        failure = await self._run_check(backend)
        if failure is None or (failure.timed_out and backend.upstream.reads != reads):
            # A server that still answers requests is busy, not frozen.
            backend.failed_checks = 0
            return False
        backend.failed_checks += 1
        if failure.certain or backend.failed_checks >= self._config.max_failed_checks:
            self.mark_unhealthy(backend, failure.reason)
            if failure.timed_out and backend.state is BackendState.DOWN:
                backend.frozen = True
                self.on_frozen(backend)
        return failure.timed_out

    async def _run_check(self, backend: Backend) -> _Failure | None:
        """Checks a server; returns ``None`` if it is well."""
        seconds = self._config.health_timeout_s
        if backend.state is BackendState.DOWN and not backend.frozen:
            seconds = max(seconds, _START_CHECK_S)
        try:
            async with asyncio.timeout(seconds):
                await self._check(backend)
        except TimeoutError:
            return _Failure(f"no answer to a health check within {seconds:g} s", timed_out=True)
        except Exception as error:
            certain = isinstance(error, ConnectError | AsleepError)
            return _Failure(f"{type(error).__name__}: {error}", certain=certain, loop=isinstance(error, LoopError))
        return None

    def _set_state(self, backend: Backend, state: BackendState) -> None:
        backend.state = state
        if state is not BackendState.ASLEEP:
            backend.idle.set()
        self._refresh()

    def _refresh(self) -> None:
        """Takes note of any change, and wakes those who wait for one."""
        named = {frozenset(backend.models) for backend in self.backends if backend.models}
        self.models = frozenset().union(*named)
        self.several_models = len(named) > 1
        self._groups.clear()
        self._changed.set()
        self._changed = asyncio.Event()
