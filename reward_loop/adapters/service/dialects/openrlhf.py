"""OpenRLHF: ``--reward.remote_url http://host:port/openrlhf`` (``--remote_rm_url`` in older versions)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from reward_loop.adapters.service.dialects.options import DialectOptions
from reward_loop.adapters.service.replies import ERRORS, Body, json_reply, score_request
from reward_loop.adapters.service.scored import Scored, ServiceError, numbers_of
from reward_loop.adapters.service.service import RewardService
from reward_loop.types import RewardSample

__all__ = ["routes"]

PATH = "/openrlhf"


class Rollouts(Body):
    """Rollouts of OpenRLHF. The lists have equal lengths; they are empty at all but the first of several URLs."""

    query: list[str]
    """The prompts with their responses, special tokens included."""
    prompts: list[str] | None = None
    """The prompts alone. Without them, the whole query is the response."""
    labels: list[Any] | None = None
    """The reference answers."""


class Rewards(Body):
    """The rewards of the rollouts, in their order."""

    rewards: list[float]
    """The scores."""
    scores: list[float]
    """The scores again: OpenRLHF filters groups by them."""
    extra_logs: dict[str, list[float]]
    """The numbers that the function returned in addition to the score, for each key that all samples have."""


def routes(service: RewardService, options: DialectOptions) -> APIRouter:
    """Return the routes of OpenRLHF."""
    router = APIRouter(tags=["OpenRLHF"])

    @router.post(PATH, response_model=Rewards, responses=ERRORS)
    async def openrlhf(
        body: Rollouts,
        request: Request,
        solution: Annotated[
            Literal["response", "query"],
            Query(description="What the function receives as `solution_str`: the query without its prompt, or all."),
        ] = "response",
    ) -> Response:
        """Score rollouts of OpenRLHF. A sample without a score is an error, since rewards are numbers."""
        samples = _samples(body, service, options, solution)
        if not samples:
            return json_reply({"rewards": [], "scores": [], "extra_logs": {}})
        scored = await score_request(service, request, samples)
        numbers = numbers_of(scored, "OpenRLHF")
        return json_reply({"rewards": numbers, "scores": numbers, "extra_logs": _extra_logs(scored)})

    return router


def _samples(body: Rollouts, service: RewardService, options: DialectOptions, solution: str) -> list[RewardSample]:
    for name, given in (("prompts", body.prompts), ("labels", body.labels)):
        if given is not None and len(given) != len(body.query):
            raise ServiceError(422, f"query has {len(body.query)} items, but {name} has {len(given)}")
    if body.query:
        service.check_given(
            () if body.labels is None else ("ground_truth",), "the request", ": OpenRLHF sends it as labels"
        )
    samples = []
    for index, query in enumerate(body.query):
        prompt = None if body.prompts is None else body.prompts[index]
        if prompt is not None and solution == "response":
            if not query.startswith(prompt):
                raise ServiceError(
                    422,
                    f"query {index} does not begin with its prompt, so the response in it is unknown: the tokenizer "
                    f"changed the prompt, or it was too long. {PATH}?solution=query passes the whole query",
                )
            query = query.removeprefix(prompt)
        samples.append(
            RewardSample(
                options.without_end(query),
                ground_truth=None if body.labels is None else body.labels[index],
                extra_info={} if prompt is None else {"prompt": prompt},
                prompt=prompt,
            )
        )
    return samples


def _extra_logs(scored: list[Scored]) -> dict[str, list[float]]:
    columns = [result.components for result in scored]
    common = [key for key in columns[0] if all(key in column for column in columns)]
    return {key: [column[key] for column in columns] for key in common}
