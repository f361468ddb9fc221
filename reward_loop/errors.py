"""All exceptions that this library raises for expected errors.

    RewardLoopError
    ├── ConfigError                 an option is unknown, missing, invalid, or contradicts another
    ├── FunctionLoadError           the user's function cannot be found, imported or called
    ├── ScoringError                one sample could not be scored
    │   ├── RewardFunctionError     the user's function raised an exception
    │   ├── RewardTimeoutError      the function exceeded its timeout
    │   ├── RewardCrashedError      its process died: a crash, `os._exit`, too much memory
    │   ├── InvalidScoreError       the function returned a value that is not a score
    │   ├── UnscoredError           the function returned None, and the policy is to raise
    │   ├── LimitError              a limit cannot grant a permit to the call
    │   ├── BudgetSpentError        the run's budget is used up
    │   └── IncompleteGroupError    the other samples of the group did not arrive in time
    ├── TransientError              raised by reward functions: the call failed, and a retry may succeed
    ├── TooManyFailuresError        the share of failed samples exceeded its bound
    ├── RewardsCancelledError       a batch of rewards was cancelled before it was complete
    └── ServerError                 a model server or the router failed
        ├── RequestError            a request got no response, or no usable one
        ├── ServerStartError        the server did not become ready
        └── ServerDiedError         the server exited and will not be restarted

Messages contain the name of the sample, the function or the option, and what to change. A `ScoringError` has fields:
the uid of the sample, the function, the number of attempts and the service's ``Retry-After``.
"""

from __future__ import annotations

from typing import Any, Self

DOWN_STATUS = frozenset({502, 503, 504, *range(520, 526), 529, 530})
"""Answers of a service, or of the gateway before it (520 to 525 and 530 are Cloudflare's), that is down or overloaded.
Repeated ones are an outage."""


class RewardLoopError(Exception):
    """Base class of all errors of this library."""


class ConfigError(RewardLoopError):
    """An option is unknown, missing, malformed, or contradicts another option."""


class FunctionLoadError(RewardLoopError):
    """The user's function cannot be found or imported, or requires arguments that the reward loop does not provide."""


class ScoringError(RewardLoopError):
    """One sample could not be scored. The message is composed from the fields.

    Args:
        problem: what went wrong, without the names of the sample and the function.
        sample: the sample, a `RewardSample`.
        function: name and file of the function.
        attempts: number of calls of the function for the sample.
        retry_after: seconds to wait before the next call, as requested by the service.
        cause: the key by which failures are grouped; by default the type of this error, and the function.
    """

    problem: str
    sample_uid: str | None = None
    data_source: str = ""
    function: str | None = None
    attempts: int | None = None
    retry_after: float | None = None
    cause: str
    """The key by which failures are grouped: for an exception of the user's function, its type and the line that raised
    it."""

    _counts_attempts = True
    """Whether the problem is the result of a call. If so, the message contains the number of calls."""

    def __init__(
        self,
        problem: str = "",
        *,
        sample: Any = None,
        function: str | None = None,
        attempts: int | None = None,
        retry_after: float | None = None,
        cause: str | None = None,
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
        # Apart from `cause`: `about` must build the default again, with the function that it adds.
        self._cause = cause
        self.cause = cause or type(self).__name__ + (f" in {function}" if function else "")

    def about(self, sample: Any = None, function: str | None = None, attempts: int | None = None) -> Self:
        """Return a copy of this error with the fields of a sample and its call."""
        # Not changed in place: the samples of a batched call share its error.
        return type(self)(
            self.problem,
            sample=sample,
            function=self.function if function is None else function,
            attempts=self.attempts if attempts is None else attempts,
            retry_after=self.retry_after,
            cause=self._cause,
        )


def describe(sample: Any) -> str:
    """Return the name of a sample in messages: its uid and its data source."""
    name = f"sample {sample.uid}" if sample.uid is not None else "a sample without uid"
    return f"{name} (data source {sample.data_source!r})" if sample.data_source else name


class RewardFunctionError(ScoringError):
    """The user's function raised an exception, which is the ``__cause__``."""


class RewardTimeoutError(ScoringError):
    """The user's function exceeded its timeout."""


class RewardCrashedError(ScoringError):
    """The worker process of the user's function died (crash, ``os._exit``, too much memory) or could not start."""


class InvalidScoreError(ScoringError):
    """The user's function returned a value that is not a score: a string, NaN, a dict without ``score``."""


class UnscoredError(ScoringError):
    """The user's function returned ``None``. Raised only under the policy ``raise`` for unscored samples."""


class LimitError(ScoringError):
    """A call requests more than its limit ever allows, waited too long for a permit, or names an unknown limit."""

    _counts_attempts = False


class BudgetSpentError(ScoringError):
    """The run's budget is used up: the function was not called, or one of its calls to a service got no permit."""

    _counts_attempts = False


class TransientError(RewardLoopError):
    """Raised by reward functions to request a retry: this call failed, and a later call may succeed.

    Args:
        message: what went wrong.
        retry_after: minimum seconds to wait before the retry; ``None`` for the configured wait.
    """

    # `is_transient` reads this attribute, also from errors of other packages.
    transient = True

    def __init__(self, message: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class IncompleteGroupError(ScoringError):
    """The other samples of the group did not arrive in time."""


class TooManyFailuresError(RewardLoopError):
    """The share of failed samples of a run exceeded its bound."""


class RewardsCancelledError(RewardLoopError):
    """A batch of rewards was cancelled, or its agent was closed, before the batch was complete."""


class ServerError(RewardLoopError):
    """A model server or the router failed."""


class RequestError(ServerError):
    """A request to a model server failed. The message contains URL, model, status and the start of the response."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after: float | None = None,
        unreachable: str | None = None,
        final: bool = False,
    ) -> None:
        """Create the error.

        Args:
            message: what happened.
            status: HTTP status of the response; ``None`` if there was no response.
            retry_after: seconds to wait before the next attempt, as requested by the server.
            unreachable: the address, if the server could not be reached.
            final: whether the request must not be repeated, or has been repeated as often as allowed.
        """
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.unreachable = unreachable
        self.final = final
        self.is_down = status in DOWN_STATUS
        """Whether the answer is that of a gateway whose server is down, or of an overloaded server. Repeated ones are
        an outage."""
        self.asked_model = ""
        """The model that was asked; empty if the request named none."""

    @property
    def transient(self) -> bool:
        """Whether a retry may succeed: no response, a malformed one, too many requests, or a server error."""
        if self.final:
            return False
        return self.status is None or self.status in (200, 408, 409, 425, 429) or self.status >= 500


class ServerStartError(ServerError):
    """A server or the router did not become ready. The message contains the end of its log."""


class ServerDiedError(ServerError):
    """A server or the router exited and will not be restarted. The message contains the end of its log."""
