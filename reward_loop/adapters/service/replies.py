"""Parts of every route: bodies, strict JSON replies, and errors."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict

from reward_loop._util.json import encode
from reward_loop.types import Outcome, RewardResult

RETRY_AFTER_S = 1
"""The seconds in ``Retry-After`` when the service is full or stops."""


class ServiceError(Exception):
    """A request that is answered with an error status.

    Args:
        status: the HTTP status.
        message: what is wrong, and how to fix it.
        outcome: the outcome of the sample that caused the error, if one did.
    """

    def __init__(self, status: int, message: str, *, outcome: Outcome | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.outcome = outcome
        self.retry_after_s = RETRY_AFTER_S if status in (429, 503) else None
        """Seconds after which the client may send the request again; ``None`` for no advice."""


class JsonBody(BaseModel):
    """Base of all bodies: docstrings are the descriptions of the API page."""

    model_config = ConfigDict(use_attribute_docstrings=True, frozen=True)


class ErrorBody(JsonBody):
    """An error."""

    error: str
    """What is wrong, with the names of the sample and the function, and how to fix it."""
    outcome: Outcome | None = None
    """For an error that a sample caused: its outcome, *failed* or *unscored*."""


_STATUSES = {
    400: "The body is not JSON.",
    401: "The API key is missing or wrong.",
    413: "The body is too long, or has too many samples.",
    422: "The body has a wrong field or type, or lacks what the function requires.",
    429: "Too many samples are in flight; see `Retry-After`.",
    500: "A sample has no score, and the reply cannot express that; or the manager raised an error.",
    503: "The service is stopping, or the limiter service is unreachable.",
}

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in _STATUSES.items()
}
"""The error replies of a route, for its documentation."""


def json_reply(content: Any, status: int = 200) -> Response:
    """Return a reply of strict JSON. NaN and infinities, which extra info may contain, become ``null``."""
    return Response(encode(content), status, media_type="application/json")


def error_reply(error: ServiceError) -> Response:
    """Return the reply for an error."""
    content = {"error": str(error)} | ({"outcome": str(error.outcome)} if error.outcome else {})
    reply = json_reply(content, error.status)
    if error.retry_after_s is not None:
        reply.headers["retry-after"] = str(error.retry_after_s)
    if error.status == HTTPStatus.UNAUTHORIZED:
        # HTTP demands this header with a 401.
        reply.headers["www-authenticate"] = 'Basic realm="reward-loop serve"'
    return reply


def numbers_of(results: list[RewardResult], trainer: str) -> list[float]:
    """Return the scores, for a reply that consists of numbers.

    Args:
        results: the results of the request.
        trainer: the name of the trainer, for the message.

    Raises:
        ServiceError: a sample has no score. Status 500: the reply cannot express that, and no number is made up.
    """
    missing = [result for result in results if result.reward is None]
    if missing:
        first = missing[0]
        policy = "on_unscored" if first.outcome is Outcome.UNSCORED else "on_failed"
        raise ServiceError(
            500,
            f"{len(missing)} of {len(results)} samples have no score, and a reply to {trainer} consists of numbers. "
            f"The first one is {first.outcome}: {first.reason}. To send a number of your choice for such samples, "
            f"start the service with -O {policy}=default -O default_score=NUMBER",
            outcome=first.outcome,
        )
    return [result.reward for result in results if result.reward is not None]
