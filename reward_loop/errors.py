"""Every exception that this library raises on purpose.

    RewardLoopError
    ├── ConfigError                 an option is unknown, missing, or contradicts another
    ├── FunctionLoadError           the user's function cannot be found, imported or called
    ├── ScoringError                one sample could not be scored
    │   ├── RewardFunctionError     the user's function raised
    │   ├── RewardTimeoutError      it ran past its deadline
    │   ├── InvalidScoreError       it returned something that is no score
    │   ├── UnscoredError           it returned None, and the policy is to raise
    │   ├── LimitError              a limit cannot let a call through
    │   └── BudgetSpentError        the run's budget is used up
    ├── TransientError              for functions to raise: the call failed, and may succeed if it is made again
    ├── JobServiceError             what all workers of a job share cannot be reached
    ├── TooManyFailuresError        the share of failed samples passed its bound
    ├── RewardsCancelledError       a batch of rewards was cancelled before it was complete
    ├── QueueClosedError            the reward queue is closed: nothing goes in, or nothing will come out
    └── ServerError                 a model server or the router
        ├── ServerStartError        it did not become ready
        └── ServerDiedError         it ended, and will not be restarted

Messages name the sample, the function or the option, and say what to change.
"""

from __future__ import annotations

__all__ = [
    "BudgetSpentError",
    "ConfigError",
    "FunctionLoadError",
    "InvalidScoreError",
    "JobServiceError",
    "LimitError",
    "QueueClosedError",
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

    def __init__(self, message: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class JobServiceError(RewardLoopError):
    """What all workers of a job share, their limits among it, cannot be reached: no call is made without it."""


class TooManyFailuresError(RewardLoopError):
    """The share of failed samples in a run passed its bound."""


class RewardsCancelledError(RewardLoopError):
    """A batch of rewards was cancelled, or its agent closed, before it was complete."""


class QueueClosedError(RewardLoopError):
    """The reward queue was closed: nothing can be put into it, or it is empty and nothing will come."""


class ServerError(RewardLoopError):
    """A model server or the router is not in working order."""


class ServerStartError(ServerError):
    """A server or the router did not become ready; the message shows the tail of its log."""


class ServerDiedError(ServerError):
    """A server or the router ended and will not be restarted; the message shows the tail of its log."""
