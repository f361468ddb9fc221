"""Repeats the health checks of a server, and takes it out of use and into use again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reward_loop.router.backend import Backend, BackendState
from reward_loop.router.config import RouterConfig
from reward_loop.router.health import AsleepError, LoopError
from reward_loop.router.http_connection import ConnectError

if TYPE_CHECKING:
    from reward_loop.router.pool import BackendPool

__all__ = ["HealthWatch"]

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0

_START_CHECK_S = 30.0
"""The timeout of a health check while a server is DOWN, in seconds, unless `health_timeout_s` is longer. A server that
is starting may accept connections and answer only when it is ready."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """The result of a failed health check."""

    reason: str
    certain: bool = False
    """Whether a single failure takes the server out of use."""
    timed_out: bool = False
    loop: bool = False
    """Whether the server is this router."""


class HealthWatch:
    """Checks one server: every `health_interval_s` seconds while it is in use, else with exponential backoff.

    Args:
        backend: the server, in the state DOWN, TRIAL or UP.
        pool: the pool of the server; it changes the state.
        check: sends a health request to the server, and raises an exception if the server is unhealthy.
        config: the intervals and timeouts.
    """

    def __init__(
        self,
        backend: Backend,
        pool: BackendPool,
        check: Callable[[Backend], Awaitable[None]],
        config: RouterConfig,
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._check = check
        self._config = config

    async def run(self) -> None:
        """Checks the server until the task is cancelled."""
        backend = self._backend
        new = True
        while True:
            if backend.state is not BackendState.UP:
                await self._readmit(new)
            new = False
            backend.taken_out.clear()
            while not backend.taken_out.is_set():
                try:
                    # In Python 3.11, wait_for loses a cancellation that coincides with the event.
                    async with asyncio.timeout(self._config.health_interval_s):
                        await backend.taken_out.wait()
                except TimeoutError:
                    while await self._check_in_use() and not backend.taken_out.is_set():
                        pass  # The check timed out, which took long enough: repeat it without a pause.

    async def _readmit(self, new: bool) -> None:
        """Repeats the health check of a server that is down until it succeeds."""
        backend, pool = self._backend, self._pool
        pause = _FIRST_PAUSE_S
        if backend.relapses:
            pause = min(_FIRST_PAUSE_S * 2**backend.relapses, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause)
        while failure := await self._run_check():
            if failure.loop:
                pool.give_up(backend, failure.reason)
                return
            backend.last_error = failure.reason
            if failure.timed_out and backend.in_flight:
                backend.frozen = True
            if backend.frozen:
                # Try again to move its requests: the retry budget may have grown, or another server may be healthy.
                pool.on_frozen(backend)
            await asyncio.sleep(min(pause, self._config.health_interval_s) if backend.frozen else pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        pool.admit(backend, new=new)

    async def _check_in_use(self) -> bool:
        """Checks a server in use.

        Returns:
            whether the check timed out and the server sent no bytes during it.
        """
        backend, pool = self._backend, self._pool
        reads = backend.upstream.reads
        failure = await self._run_check()
        if failure is None or (failure.timed_out and backend.upstream.reads != reads):
            # A server that still answers requests is busy, not frozen.
            backend.failed_checks = 0
            return False
        backend.failed_checks += 1
        if failure.certain or backend.failed_checks >= self._config.max_failed_checks:
            pool.mark_unhealthy(backend, failure.reason)
            if failure.timed_out and backend.state is BackendState.DOWN:
                backend.frozen = True
                pool.on_frozen(backend)
        return failure.timed_out

    async def _run_check(self) -> _Failure | None:
        """Checks the server; returns ``None`` if it is healthy."""
        backend = self._backend
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
