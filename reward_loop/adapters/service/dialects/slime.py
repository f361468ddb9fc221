"""slime and miles: ``--rm-type remote_rm --rm-url http://host:port/slime``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from reward_loop.adapters.service.dialects.options import DialectOptions
from reward_loop.adapters.service.replies import ERRORS, Body, json_reply, score_request
from reward_loop.adapters.service.scored import numbers_of
from reward_loop.adapters.service.service import RewardService
from reward_loop.types import RewardSample

__all__ = ["routes"]


class Rollout(Body):
    """A rollout of slime."""

    prompt: str | list[dict[str, Any]]
    """The prompt, as text or as chat messages."""
    response: str
    """The response."""
    label: Any = None
    """The reference answer."""


def routes(service: RewardService, options: DialectOptions) -> APIRouter:
    """Return the routes of slime."""
    router = APIRouter(tags=["slime, miles"])

    @router.post("/slime", response_model=float, responses=ERRORS)
    async def slime(body: Rollout, request: Request) -> Response:
        """Score a rollout of slime. The reply is the score; a sample without a score is an error."""
        service.check_given(() if body.label is None else ("ground_truth",), "the request", ": slime sends it as label")
        sample = RewardSample(
            options.without_end(body.response),
            ground_truth=body.label,
            extra_info={"prompt": body.prompt},
            prompt=body.prompt,
        )
        (number,) = numbers_of(await score_request(service, request, [sample]), "slime")
        return json_reply(number)

    return router
