"""Parts of every route: strict JSON replies, errors, and the cancellation of samples whose client disconnects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict
from starlette.requests import ClientDisconnect

from reward_loop._util.json import encode
from reward_loop._util.web_server import stop_on_disconnect
from reward_loop.adapters.service.scored import Scored, ServiceError
from reward_loop.adapters.service.service import RewardService
from reward_loop.types import Outcome, RewardSample

__all__ = ["ERRORS", "Body", "ErrorBody", "error_reply", "json_reply", "score_request"]


class Body(BaseModel):
    """Base of all bodies: docstrings are the descriptions of the API page."""

    model_config = ConfigDict(use_attribute_docstrings=True, frozen=True)


class ErrorBody(Body):
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
    content = {"error": error.message} | ({"outcome": str(error.outcome)} if error.outcome else {})
    reply = json_reply(content, error.status)
    if error.retry_after_s is not None:
        reply.headers["retry-after"] = str(error.retry_after_s)
    return reply


async def score_request(
    service: RewardService, request: Request, samples: Sequence[RewardSample], groups: Sequence[int] | None = None
) -> list[Scored]:
    """Score the samples of a request. If the client disconnects, its samples are cancelled.

    Raises:
        ServiceError: see `RewardService.score`.
        ClientDisconnect: the client disconnected.
    """
    results: list[Scored] = []

    async def work() -> None:
        results.extend(await service.score(samples, path=request.url.path, groups=groups))

    if not await stop_on_disconnect(request.receive, work):
        raise ClientDisconnect
    return results
