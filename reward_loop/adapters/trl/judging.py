"""The calls of the async reward functions for one batch, while the main thread does something else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any

__all__ = ["Judging"]


class Judging:
    """Runs the async reward functions of a batch on an event loop in another thread.

    Args:
        functions: the async reward functions, each with its index among all reward functions.
        call: the keyword arguments that TRL passes to each reward function.
        loop: the event loop.
    """

    def __init__(
        self,
        functions: Mapping[int, Callable[..., Awaitable[Any]]],
        call: Mapping[str, Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.waiting_s = 0.0
        """Seconds for which `rewards` has waited."""
        self._began = time.perf_counter()
        self._ended = self._began
        self._log_metric: Callable[[str, float], None] | None = call.get("log_metric")
        self._left = len(functions)
        self._logged: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        # TRL collects what functions log until the next rewards are complete: those of another batch.
        deferred = {name: self._deferred(call[name]) for name in ("log_extra", "log_metric") if name in call}
        arguments = {**call, **deferred}
        self._futures: dict[int, Future[Any]] = {
            index: asyncio.run_coroutine_threadsafe(self._timed(function, arguments), loop)
            for index, function in functions.items()
        }

    def _deferred(self, log: Callable[..., None]) -> Callable[..., None]:
        return lambda *values: self._logged.append((log, values))

    async def _timed(self, function: Callable[..., Awaitable[Any]], arguments: Mapping[str, Any]) -> Any:
        try:
            return await function(**arguments)
        finally:
            self._ended = max(self._ended, time.perf_counter())

    @property
    def judging_s(self) -> float:
        """Seconds from the start until the last function has returned; valid once all rewards were collected."""
        return self._ended - self._began

    @property
    def hidden_share(self) -> float:
        """The share of the judging time during which the training did not wait; 1 if nothing took time."""
        return max(0.0, 1 - self.waiting_s / self.judging_s) if self.judging_s > 0 else 1.0

    def rewards(self, index: int) -> Any:
        """Wait for the rewards of a function, and log what the functions have logged so far.

        The rewards of the last function also log for how long the batch was judged and waited for.

        Raises:
            Exception: what the function raised. The other functions are cancelled.
        """
        began = time.perf_counter()
        try:
            rewards = self._futures[index].result()
        except BaseException:
            self.cancel()
            raise
        self.waiting_s += time.perf_counter() - began
        while self._logged:
            log, values = self._logged.pop(0)
            log(*values)
        self._left -= 1
        if not self._left and self._log_metric is not None:
            self._log_metric("overlap/waiting_seconds", self.waiting_s)
            self._log_metric("overlap/judging_seconds", self.judging_s)
            self._log_metric("overlap/hidden_share", self.hidden_share)
        return rewards

    def cancel(self) -> None:
        """Cancel the calls that have not ended."""
        for future in self._futures.values():
            future.cancel()
