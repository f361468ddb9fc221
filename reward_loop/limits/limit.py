"""``reward_loop.limit``: a reward function's own calls, within the limits of the services that they go to."""

from __future__ import annotations

import asyncio
from types import TracebackType

from reward_loop.limits import isolated
from reward_loop.limits.lease import Lease, amount, current_lease, current_limits, enter
from reward_loop.processes import worker

__all__ = ["limit"]


class limit:
    """``async with reward_loop.limit("judge", tokens=800) as lease:`` around a call to that service.

    Waits until the service's limits, ``reward_loop.limits.judge``, have room for one more call, of all workers of the
    job together. Waiting does not count towards the function's deadline. A sync function writes ``with`` instead.

    Outside of a reward function that the reward loop calls, and where no limits are configured at all, it lets
    everything through: the function may be tried by itself.

    Args:
        name: the service.
        tokens: how many tokens the call will use, prompt and answer, as far as it can be told before.

    Raises:
        ValueError: ``tokens`` is no amount.
        LimitError: there is no such limit, this call can never fit it, or its turn did not come in time.
        JobServiceError: whoever keeps the limits for all workers cannot be reached.
    """

    def __init__(self, name: str, *, tokens: float = 0) -> None:
        self._name = name
        self._tokens = amount("tokens", tokens) or 0.0
        self._lease: Lease | None = None

    async def __aenter__(self) -> Lease:
        if worker.is_worker:
            return self._hold(await isolated.enter_async(self._name, self._tokens))
        call = current_limits.get()
        return self._hold(Lease(None, None) if call is None else await enter(call, self._name, self._tokens))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    def __enter__(self) -> Lease:
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("in an async function, write `async with reward_loop.limit(...)`")
        if worker.is_worker:
            return self._hold(isolated.enter(self._name, self._tokens))
        call = current_limits.get()
        if call is None:
            return self._hold(Lease(None, None))
        entering = call.enter_for_thread(self._name, self._tokens)
        return self._hold(asyncio.run_coroutine_threadsafe(entering, call.loop).result())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    def _hold(self, lease: Lease) -> Lease:
        self._lease, self._token = lease, current_lease.set(lease)
        return lease

    def _leave(self, error: BaseException | None) -> None:
        assert self._lease is not None
        current_lease.reset(self._token)
        self._lease.end(error)
