"""Retries of calls that failed with a transient error.

Invariants:

- An attempt that the service refused or asked to repeat later (HTTP 429, 529, or a ``Retry-After``) does not use up
  `max_attempts`: a busy service loses no sample. All other failed attempts do.
- The pauses between attempts grow, also those that the service asked for, so the number of refused attempts is small.
- `max_seconds` ends all of it. Time spent waiting for limits does not count: other samples use it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import tenacity

from reward_loop._util.transient import is_refusal, is_transient, retry_after
from reward_loop.config import RetryConfig
from reward_loop.processes.invocation import CallOutcome
from reward_loop.records import current, waiting_for

__all__ = ["Retry"]


class Retry:
    """Retries a call with exponential backoff while it fails with a transient error. Based on `tenacity`.

    Args:
        config: the maximum number of attempts, the maximum total time, and the backoff.
        sleep: awaited for each pause, with its length in seconds; tests replace it.
    """

    def __init__(self, config: RetryConfig, sleep: Callable[[float], Awaitable[None]] | None = None) -> None:
        self.config = config
        self._sleep = sleep or _sleep
        self._pause = tenacity.wait_random_exponential(multiplier=config.initial_wait, max=config.max_wait)

    def applies_to(self, outcome: CallOutcome) -> bool:
        """Return whether a call failed with a transient error, and more than one attempt is configured."""
        return outcome.exception is not None and self.config.max_attempts > 1 and is_transient(outcome.exception)

    async def again(
        self, first: CallOutcome, attempt: Callable[[CallOutcome], Awaitable[CallOutcome]], started: float
    ) -> CallOutcome:
        """Retry until an attempt succeeds or fails permanently, or the attempts or the total time are used up.

        Attempts that the service refused or asked to repeat later do not count towards `config.max_attempts`.

        Args:
            first: the outcome of the first attempt.
            attempt: makes one more attempt; it receives the outcome of the last one.
            started: start of the first attempt by `time.monotonic`; `config.max_seconds` counts from there, without
                the time that attempts waited for limits.

        Returns:
            The outcome of the last attempt, successful or not, with the times and calls of all attempts.
        """
        outcomes: list[CallOutcome] = []

        async def make() -> CallOutcome:
            outcomes.append(await attempt(outcomes[-1]) if outcomes else first)
            return outcomes[-1]

        def stop(state: tenacity.RetryCallState) -> bool:
            limited = sum(outcome.waited for outcome in outcomes)
            elapsed = time.monotonic() - started - limited + state.upcoming_sleep
            counted = sum(not _is_postponed(outcome) for outcome in outcomes)
            return counted >= self.config.max_attempts or elapsed >= self.config.max_seconds

        retrying = tenacity.AsyncRetrying(
            stop=stop,
            wait=self._seconds,
            retry=lambda state: self.applies_to(_outcome(state)),
            retry_error_callback=_outcome,
            sleep=self._sleep,
        )
        last: CallOutcome = await retrying(make)
        last.attempts = sum(outcome.attempts for outcome in outcomes)
        last.seconds = sum(outcome.seconds for outcome in outcomes)
        last.queued = sum(outcome.queued for outcome in outcomes)
        last.waited = max(0.0, time.monotonic() - started - last.seconds - last.queued)
        return last

    def _seconds(self, state: tenacity.RetryCallState) -> float:
        """Return the length of the next pause: a random time, in addition to the service's ``Retry-After``.

        The random time spreads the retries of all samples that the service refused at the same moment.
        """
        error = _outcome(state).exception
        asked = None if error is None else retry_after(error)
        return (asked or 0.0) + float(self._pause(state))


def _is_postponed(outcome: CallOutcome) -> bool:
    """Return whether the service refused the call, or asked to repeat it later."""
    error = outcome.exception
    return error is not None and (is_refusal(error) or bool(retry_after(error)))


async def _sleep(seconds: float) -> None:
    with waiting_for(current(), "the pause before the next attempt"):
        await asyncio.sleep(seconds)


def _outcome(state: tenacity.RetryCallState) -> CallOutcome:
    assert state.outcome is not None
    outcome: CallOutcome = state.outcome.result()
    return outcome
