"""Call the other methods of the user's class: ``post_process_scores`` and ``log``."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from reward_loop.errors import InvalidScoreError, RewardCrashedError, RewardFunctionError, RewardTimeoutError
from reward_loop.processes.invocation import Invocation, describe_exception
from reward_loop.scoring.normalise import normalise
from reward_loop.scoring.on_loop import LoopCalls
from reward_loop.scoring.signature import Target
from reward_loop.scoring.threads import DaemonThreads

__all__ = ["Hooks"]


class Hooks:
    """Calls methods of the user's class in threads. If a method returns an awaitable, it is awaited on the event loop.

    Args:
        target: the class's ``compute_score`` with its hooks.
        threads: where the methods run.
        loop_calls: where awaitables run.
    """

    def __init__(self, target: Target, threads: DaemonThreads, loop_calls: LoopCalls) -> None:
        self._target = target
        self._threads = threads
        self._loop_calls = loop_calls

    async def post_process_scores(self, scores: list[float], timeout: float | None) -> list[float]:
        """Return the scores after ``post_process_scores``; `ScoringFunction.post_process_scores` has the details."""
        if self._target.post_process_scores is None:
            return scores
        method = f"post_process_scores beside {self._target.name}"
        invocation = Invocation(_called, (self._target.post_process_scores, scores))
        returned = await self._call(invocation, method, timeout)
        try:
            processed = [normalise(score)[0] for score in returned]
        except (InvalidScoreError, TypeError) as error:
            raise InvalidScoreError(f"must return a list of numbers: {error}", function=method) from error
        numbers = [score for score in processed if score is not None]
        if len(numbers) != len(scores):
            problem = f"received {len(scores)} scores and returned {len(numbers)} numbers"
            raise InvalidScoreError(problem, function=method)
        return numbers

    async def log(self, columns: Mapping[str, Any], timeout: float | None) -> None:
        """Call ``log`` with the columns that it declares; `ScoringFunction.log` has the details."""
        if self._target.log is None:
            return
        declared = {name: column for name, column in columns.items() if name in self._target.logs}
        await self._call(Invocation(self._target.log, (), declared), f"log beside {self._target.name}", timeout)

    async def _call(self, invocation: Invocation, method: str, timeout: float | None) -> Any:
        """Call a method in a thread, and return its value.

        Raises:
            ScoringError: the method raised, ran past the deadline, or could not be started.
        """
        try:
            outcome = await self._threads.run(invocation, timeout)
            if outcome.exception is None and inspect.isawaitable(outcome.value):
                outcome = await self._loop_calls.run(outcome.value, timeout)
        except TimeoutError:
            raise RewardTimeoutError(f"ran past its deadline of {timeout} s", function=method) from None
        except (OSError, RuntimeError) as error:  # not of the method, whose exceptions are data: no thread is free
            raise RewardCrashedError(
                f"could not be started: {type(error).__name__}: {error}", function=method
            ) from error
        if outcome.exception is not None:
            problem = f"raised {describe_exception(outcome.exception)}"
            raise RewardFunctionError(problem, function=method) from outcome.exception
        return outcome.value


def _called(post_process_scores: Callable[[list[float]], Any], scores: list[float]) -> Any:
    """Return what the method returns; the numbers of a generator as a list, with at most one number too many."""
    returned = post_process_scores(list(scores))
    # Here, the code of a generator runs in the thread and has a deadline; its exceptions are data.
    return list(itertools.islice(returned, len(scores) + 1)) if isinstance(returned, Iterator) else returned
