"""Retries of calls that failed with a transient error.

Invariants:

- An attempt that the service refused or asked to repeat later (HTTP 429, 529, or a ``Retry-After``) does not use up
  `max_attempts`: a busy service loses no sample. All other failed attempts do.
- The pauses between attempts grow, also those that the service asked for, so the number of refused attempts is small.
- `max_seconds` ends all of it. Time spent waiting for limits does not count: other samples use it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from reward_loop._util.transient import is_refusal, is_transient, retry_after
from reward_loop.config import RetryConfig
from reward_loop.processes.outcome import CallOutcome
from reward_loop.records import current, waiting_for

__all__ = ["Retry"]


class Retry:
    """Retries a call with exponential backoff while it fails with a transient error.

    Args:
        config: the maximum number of attempts, the maximum total time, and the backoff.
        sleep: awaited for each pause, with its length in seconds; tests replace it.
    """

    def __init__(self, config: RetryConfig, sleep: Callable[[float], Awaitable[None]] | None = None) -> None:
        self.config = config
        self._sleep = sleep or _sleep

    def applies_to(self, outcome: CallOutcome) -> bool:
        """Return whether a call failed with a transient error, and more than one attempt is configured."""
        return outcome.exception is not None and self.config.max_attempts > 1 and is_transient(outcome.exception)

    async def again(
        self, first: CallOutcome, attempt: Callable[[int], Awaitable[CallOutcome]], started: float
    ) -> CallOutcome:
        """Retry until an attempt succeeds or fails permanently, or the attempts or the total time are used up.

        Args:
            first: the outcome of the first attempt.
            attempt: makes one more attempt; it receives the attempt's number, from 2.
            started: start of the first attempt by `time.monotonic`; `config.max_seconds` counts from there.

        Returns:
            The outcome of the last attempt, successful or not, with the times and calls of all attempts.
        """
        outcomes = [first]
        longest = min(self.config.initial_wait, self.config.max_wait)
        while self.applies_to(outcomes[-1]):
            # The random time spreads the retries of all samples that the service refused at the same moment.
            pause = _asked_pause(outcomes[-1]) + random.uniform(0, longest)
            longest = min(2 * longest, self.config.max_wait)
            counted = sum(not _is_postponed(outcome) for outcome in outcomes)
            elapsed = time.monotonic() - started - sum(outcome.waited for outcome in outcomes)
            if counted >= self.config.max_attempts or elapsed + pause >= self.config.max_seconds:
                break
            await self._sleep(pause)
            outcomes.append(await attempt(len(outcomes) + 1))
        last = outcomes[-1]
        last.attempts = sum(outcome.attempts for outcome in outcomes)
        last.seconds = sum(outcome.seconds for outcome in outcomes)
        last.queued = sum(outcome.queued for outcome in outcomes)
        last.waited = max(0.0, time.monotonic() - started - last.seconds - last.queued)
        return last


def _asked_pause(outcome: CallOutcome) -> float:
    """Return the seconds that the service asked to wait."""
    return 0.0 if outcome.exception is None else retry_after(outcome.exception) or 0.0


def _is_postponed(outcome: CallOutcome) -> bool:
    """Return whether the service refused the call, or asked to repeat it later."""
    return outcome.exception is not None and (is_refusal(outcome.exception) or _asked_pause(outcome) > 0)


async def _sleep(seconds: float) -> None:
    with waiting_for(current(), "the pause before the next attempt"):
        await asyncio.sleep(seconds)
