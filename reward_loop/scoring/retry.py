"""Retries of calls that failed with a transient error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import tenacity

from reward_loop._util.transient import is_transient, retry_after
from reward_loop.config import RetryConfig

__all__ = ["Retry"]

T = TypeVar("T")


class Retry:
    """Retries a call with exponential backoff while it fails with a transient error. Based on `tenacity`.

    Args:
        config: the maximum number of attempts, the maximum total time, and the backoff.
        sleep: awaited for each pause, with its length in seconds.
    """

    def __init__(self, config: RetryConfig, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self.config = config
        self._sleep = sleep
        self._pause = tenacity.wait_random_exponential(multiplier=config.initial_wait, max=config.max_wait)

    async def again(
        self,
        first: T,
        attempt: Callable[[], Awaitable[T]],
        error_of: Callable[[T], BaseException | None],
        elapsed: float = 0.0,
    ) -> T:
        """Retry until an attempt succeeds or fails permanently, or the attempts or the total time are used up.

        Args:
            first: the result of the first attempt.
            attempt: makes one more attempt.
            error_of: returns the exception of a failed attempt, or ``None``.
            elapsed: seconds that the first attempt took; they count towards ``config.max_seconds``.

        Returns:
            The result of the last attempt, successful or not.
        """

        def passes(state: tenacity.RetryCallState) -> bool:
            error = error_of(_given(state))
            return error is not None and is_transient(error)

        def pause(state: tenacity.RetryCallState) -> float:
            error = error_of(_given(state))
            asked = None if error is None else retry_after(error)
            own = float(self._pause(state))
            # Not before the Retry-After of the service, plus a random delay that spreads the retries.
            return own if asked is None else asked + min(own, self.config.initial_wait)

        async def make(attempts: Iterator[int]) -> T:
            return first if next(attempts, None) is not None else await attempt()

        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.config.max_attempts)
            | tenacity.stop_before_delay(max(0.0, self.config.max_seconds - elapsed)),
            wait=pause,
            retry=passes,
            retry_error_callback=_given,
            sleep=self._sleep,
        )
        result: T = await retrying(make, iter([1]))
        return result


def _given(state: tenacity.RetryCallState) -> Any:
    assert state.outcome is not None
    return state.outcome.result()
