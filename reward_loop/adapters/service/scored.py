"""What the service reports on a sample that has ended, and its errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reward_loop.types import Outcome, Reward, finite_number, returned_numbers

__all__ = ["Scored", "ServiceError", "numbers_of"]


class ServiceError(Exception):
    """A request that is answered with an error status.

    Args:
        status: the HTTP status.
        message: what is wrong, and how to fix it.
        outcome: the outcome of the sample that caused the error, if one did.
        retry_after_s: seconds after which the client may send the request again; ``None`` for no advice.
    """

    def __init__(
        self, status: int, message: str, *, outcome: Outcome | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.outcome = outcome
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Scored:
    """The reward of one sample."""

    uid: str
    score: float | None
    """The score; ``None`` if the sample is masked. Under the policy ``default``, the user's default score."""
    outcome: Outcome
    error: str | None
    """Why the sample is failed or unscored; ``None`` if it is scored."""
    extra_info: dict[str, Any]
    """The extra info of the reward, with the keys that the reward loop sets."""

    @classmethod
    def of(cls, uid: str, reward: Reward) -> Scored:
        """Return the result of a sample from its reward. Managers that report no outcome have *scored* the sample."""
        extra_info = dict(reward.get("reward_extra_info") or {})
        outcome = Outcome(extra_info.get("reward_outcome", Outcome.SCORED))
        error = extra_info.get("reward_error") or None
        score = None if extra_info.get("reward_masked") else reward["reward_score"]
        if score is not None and finite_number(score) is None:
            error = f"sample {uid}: the manager returned the score {score!r}, which is not a finite number"
            return cls(uid, None, Outcome.FAILED, error, extra_info)
        if outcome is Outcome.UNSCORED and error is None:
            error = f"sample {uid}: the function gave no score"
        return cls(uid, None if score is None else float(score), outcome, error, extra_info)

    @property
    def components(self) -> dict[str, float]:
        """The finite numbers that the function returned in addition to the score, by their keys."""
        return {key: number for key, number in returned_numbers(self.extra_info).items() if key != "score"}


def numbers_of(results: list[Scored], trainer: str) -> list[float]:
    """Return the scores, for a reply that consists of numbers.

    Args:
        results: the results of the request.
        trainer: the name of the trainer, for the message.

    Raises:
        ServiceError: a sample has no score. Status 500: the reply cannot express that, and no number is made up.
    """
    missing = [result for result in results if result.score is None]
    if missing:
        first = missing[0]
        policy = "on_unscored" if first.outcome is Outcome.UNSCORED else "on_failed"
        raise ServiceError(
            500,
            f"{len(missing)} of {len(results)} samples have no score, and a reply to {trainer} consists of numbers. "
            f"The first one is {first.outcome}: {first.error}. To send a number of your choice for such samples, "
            f"start the service with -O {policy}=default -O default_score=NUMBER",
            outcome=first.outcome,
        )
    return [result.score for result in results if result.score is not None]
