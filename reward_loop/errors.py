"""Every exception that this library raises on purpose.

    RewardLoopError
    ├── ConfigError                 an option is unknown, missing, or contradicts another
    ├── FunctionLoadError           the user's function cannot be found, imported or called
    ├── ScoringError                one sample could not be scored
    │   ├── RewardFunctionError     the user's function raised
    │   ├── RewardTimeoutError      the function ran past its deadline
    │   ├── RewardCrashedError      its process died: a crash, `os._exit`, too much memory
    │   ├── InvalidScoreError       the function returned a value that is not a score
    │   ├── UnscoredError           the function returned None, and the policy is to raise
    │   ├── LimitError              a limit cannot let a call through
    │   ├── BudgetSpentError        the run's budget is used up
    │   └── IncompleteGroupError    the other samples of the group did not arrive in time
    ├── TransientError              for functions to raise: the call failed, and may succeed if it is made again
    ├── JobServiceError             what all workers of a job share cannot be reached
    ├── TooManyFailuresError        the share of failed samples passed its bound
    ├── RewardsCancelledError       a batch of rewards was cancelled before it was complete
    ├── QueueClosedError            the reward queue is closed: nothing goes in, or nothing will come out
    └── ServerError                 a model server or the router
        ├── RequestError            it did not answer a request, or not in a way that can be used
        ├── ServerStartError        it did not become ready
        └── ServerDiedError         it ended, and will not be restarted

Messages name the sample, the function or the option, and say what to change. The fields of a `ScoringError` hold the
uid of the sample, the function, the number of attempts and the service's ``Retry-After``.
"""

from __future__ import annotations

from typing import Protocol, Self

__all__ = [
    "BudgetSpentError",
    "ConfigError",
    "FunctionLoadError",
    "IncompleteGroupError",
    "InvalidScoreError",
    "JobServiceError",
    "LimitError",
    "QueueClosedError",
    "RequestError",
    "RewardCrashedError",
    "RewardFunctionError",
    "RewardLoopError",
    "RewardTimeoutError",
    "RewardsCancelledError",
    "ScoringError",
    "ServerDiedError",
    "ServerError",
    "ServerStartError",
    "TooManyFailuresError",
    "TransientError",
    "UnscoredError",
]


class RewardLoopError(Exception):
    """Base class of all errors of this library."""


class ConfigError(RewardLoopError):
    """An option is unknown, missing, malformed, or contradicts another option."""


class FunctionLoadError(RewardLoopError):
    """The user's function cannot be found, imported or called with what the reward loop provides."""


class _Sample(Protocol):
    """The part of a `RewardSample` that messages name."""

    @property
    def uid(self) -> str | None: ...
    @property
    def data_source(self) -> str: ...


class ScoringError(RewardLoopError):
    """One sample could not be scored. The message is made from the fields.

    Args:
        problem: what went wrong, without the names of the sample and the function.
        sample: the sample, a `RewardSample`.
        function: name and file of the function.
        attempts: how often the function was called for the sample.
        retry_after: seconds that the service asked to wait before the next call.
    """

    problem: str
    sample_uid: str | None = None
    data_source: str = ""
    function: str | None = None
    attempts: int | None = None
    retry_after: float | None = None

    _counts_attempts = True
    """Whether the problem is the end of a call, so that the message says how many calls there were."""

    def __init__(
        self,
        problem: str = "",
        *,
        sample: _Sample | None = None,
        function: str | None = None,
        attempts: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        message = problem
        if self._counts_attempts and attempts is not None and attempts > 1:
            message = f"was called {attempts} times; the last call {message}"
        if function is not None:
            message = f"{function} {message}"
        if sample is not None:
            message = f"{describe(sample)}: {message}"
            self.sample_uid, self.data_source = sample.uid, sample.data_source
        super().__init__(message)
        self.problem, self.function, self.attempts, self.retry_after = problem, function, attempts, retry_after

    def about(self, sample: _Sample, function: str | None = None, attempts: int | None = None) -> Self:
        """Return the same error with the fields of a sample and its call."""
        return type(self)(
            self.problem,
            sample=sample,
            function=self.function if function is None else function,
            attempts=self.attempts if attempts is None else attempts,
            retry_after=self.retry_after,
        )


def describe(sample: _Sample) -> str:
    """Return the name of a sample in messages: its uid and its data source."""
    name = f"sample {sample.uid}" if sample.uid is not None else "a sample without uid"
    return f"{name} (data source {sample.data_source!r})" if sample.data_source else name


class RewardFunctionError(ScoringError):
    """The user's function raised; the original exception is the ``__cause__``."""


class RewardTimeoutError(ScoringError):
    """The user's function ran past its deadline."""


class RewardCrashedError(ScoringError):
    """The process in which the user's function ran died (a crash, ``os._exit``, too much memory) or could not start."""


class InvalidScoreError(ScoringError):
    """The user's function returned a value that is not a score: a string, NaN, a dict without ``score``."""


class UnscoredError(ScoringError):
    """The user's function returned ``None``; raised only where the policy for unscored samples is to raise."""


class LimitError(ScoringError):
    """A call asks for more than its limit ever allows, waited too long, or names a limit that does not exist."""

    _counts_attempts = False


class BudgetSpentError(ScoringError):
    """The run's budget is used up, so that the function was not called."""

    _counts_attempts = False


class TransientError(RewardLoopError):
    """For reward functions to raise: this call failed, and may succeed if it is made again.

    Args:
        message: what went wrong.
        retry_after: seconds after which to try again, if the service said so.
    """

    transient = True

    def __init__(self, message: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class JobServiceError(RewardLoopError):
    """What all workers of a job share, their limits among it, cannot be reached: no call is made without it."""


class IncompleteGroupError(ScoringError):
    """The other samples of the group did not arrive in time."""


class TooManyFailuresError(RewardLoopError):
    """The share of failed samples in a run passed its bound."""


class RewardsCancelledError(RewardLoopError):
    """A batch of rewards was cancelled, or its agent closed, before it was complete."""


class QueueClosedError(RewardLoopError):
    """The reward queue was closed: nothing can be put into it, or it is empty and nothing will come."""


class ServerError(RewardLoopError):
    """A model server or the router is not in working order."""


class RequestError(ServerError):
    """A request to a model server failed; the message has its URL, model, status and the start of the answer."""

    def __init__(self, message: str, *, status: int | None = None, retry_after: float | None = None) -> None:
        """Take the message.

        Args:
            message: what happened.
            status: the HTTP status of the answer; ``None`` where there was none.
            retry_after: seconds that the server asked to wait before the next attempt.
        """
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after

    @property
    def transient(self) -> bool:
        """Whether the same request may succeed later: no answer, a broken one, too many requests, a server's fault."""
        return self.status is None or self.status in (200, 408, 409, 425, 429) or self.status >= 500


class ServerStartError(ServerError):
    """A server or the router did not become ready; the message shows the tail of its log."""


class ServerDiedError(ServerError):
    """A server or the router ended and will not be restarted; the message shows the tail of its log."""
