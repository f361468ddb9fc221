"""Every exception that this library raises on purpose.

    RewardLoopError
    ├── ConfigError                 an option is unknown, missing, or contradicts another
    ├── FunctionLoadError           the user's function cannot be found, imported or called
    ├── ScoringError                one sample could not be scored
    │   ├── RewardFunctionError     the user's function raised
    │   ├── RewardTimeoutError      it ran past its deadline
    │   ├── RewardCrashedError      it took its process with it: a crash, `os._exit`, too much memory
    │   ├── InvalidScoreError       it returned something that is no score
    │   ├── UnscoredError           it returned None, and the policy is to raise
    │   ├── LimitError              a limit cannot let a call through
    │   ├── BudgetSpentError        the run's budget is used up
    │   └── IncompleteGroupError    others of its group, which it is compared with, did not come
    ├── TransientError              for functions to raise: the call failed, and may succeed if it is made again
    ├── JobServiceError             what all workers of a job share cannot be reached
    ├── TooManyFailuresError        the share of failed samples passed its bound
    ├── RewardsCancelledError       a batch of rewards was cancelled before it was complete
    ├── QueueClosedError            the reward queue is closed: nothing goes in, or nothing will come out
    └── ServerError                 a model server or the router
        ├── RequestError            it did not answer a request, or not in a way that can be used
        ├── ServerStartError        it did not become ready
        └── ServerDiedError         it ended, and will not be restarted

Messages name the sample, the function or the option, and say what to change.
"""

from __future__ import annotations

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


class ScoringError(RewardLoopError):
    """One sample could not be scored."""


class RewardFunctionError(ScoringError):
    """The user's function raised; the original exception is the ``__cause__``."""


class RewardTimeoutError(ScoringError):
    """The user's function ran past its deadline."""


class RewardCrashedError(ScoringError):
    """The process in which the user's function ran died: of a crash, by ``os._exit``, or of too much memory."""


class InvalidScoreError(ScoringError):
    """The user's function returned something that is no score: a string, NaN, a dict without ``score``."""


class UnscoredError(ScoringError):
    """The user's function returned ``None``; raised only where the policy for unscored samples is to raise."""


class LimitError(ScoringError):
    """A call asks for more than its limit ever allows, waited too long, or names a limit that does not exist."""


class BudgetSpentError(ScoringError):
    """The run's budget is used up, so that the function was not called."""


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
    """Samples that this one is compared with did not come in time."""


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
