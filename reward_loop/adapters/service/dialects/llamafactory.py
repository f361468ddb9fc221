"""LLaMA-Factory: ``reward_model_type: api`` and ``reward_model: http://host:port/llamafactory``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from reward_loop.adapters.service.dialects.options import DialectOptions
from reward_loop.adapters.service.replies import ERRORS, Body, json_reply, score_request
from reward_loop.adapters.service.scored import numbers_of
from reward_loop.adapters.service.service import RewardService
from reward_loop.types import RewardSample

__all__ = ["routes"]


class Messages(Body):
    """Rollouts of LLaMA-Factory."""

    messages: list[str] = Field(min_length=1)
    """The prompts with their responses, as one text each, special tokens included. The function receives the whole
    text as `solution_str`."""


class Scores(Body):
    """The scores of the rollouts, in their order."""

    scores: list[float]
    """The scores."""


def routes(service: RewardService, options: DialectOptions) -> APIRouter:
    """Return the routes of LLaMA-Factory."""
    router = APIRouter(tags=["LLaMA-Factory"])

    @router.post("/llamafactory", response_model=Scores, responses=ERRORS)
    async def llamafactory(body: Messages, request: Request) -> Response:
        """Score rollouts of LLaMA-Factory. A sample without a score is an error, since scores are numbers."""
        service.check_given((), "the request", ": LLaMA-Factory sends no reference answers")
        samples = [RewardSample(options.without_end(text)) for text in body.messages]
        scored = await score_request(service, request, samples)
        return json_reply({"scores": numbers_of(scored, "LLaMA-Factory")})

    return router
