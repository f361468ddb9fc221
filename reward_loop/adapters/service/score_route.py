"""``POST /score``: requests with one sample or many, and with groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Discriminator, Field, Tag

from reward_loop.adapters.service.replies import ERRORS, Body, ServiceError, json_reply
from reward_loop.adapters.service.service import RewardService
from reward_loop.managers.scorer import Scored
from reward_loop.types import Outcome, RewardSample

__all__ = ["KINDS", "routes"]


class Sample(Body):
    """One finished rollout. The names are those of verl; the function receives only the arguments it declares."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"solution_str": "2+2 is 4", "ground_truth": "4"}]}
    )

    solution_str: str
    """The response, as text without special tokens."""
    ground_truth: Any = None
    """The reference answer."""
    data_source: str = ""
    """The data set of the prompt."""
    extra_info: dict[str, Any] = Field(default_factory=dict)
    """Other fields of the data set."""
    prompt: Any = None
    """The prompt, as text or as chat messages, for the sample's record. Functions do not receive it."""
    uid: str | None = None
    """The name of the sample in errors and records. By default a unique name."""
    step: int | None = None
    """The training step, for the sample's record."""
    group: str | None = None
    """The group: samples of a request with the same text are responses to the same prompt."""


class Samples(Body):
    """Many samples. They are scored concurrently; the reply has their results in the same order."""

    model_config = ConfigDict(extra="forbid")

    samples: list[Sample] = Field(min_length=1)
    """The samples."""
    group_sizes: list[Annotated[int, Field(ge=1)]] | None = None
    """The size of each group, if the members of a group are neighbours; instead of `group` in each sample."""


class Result(Body):
    """The result of a sample."""

    uid: str
    """The name of the sample."""
    score: float | None
    """The score. `null` if there is none: leave such a sample out of the baseline and the loss."""
    outcome: Outcome
    """*scored*; *unscored*: the function returned `None`; *failed*: it raised, timed out, or returned an invalid
    score."""
    error: str | None
    """Why the sample is failed or unscored."""
    reward_extra_info: dict[str, Any]
    """The other keys that the function returned, such as components, and the times that the reward loop measured."""


class Results(Body):
    """The results of many samples."""

    results: list[Result]
    """One result for each sample, in the order of the request."""


ONE, MANY = KINDS = ("one sample", "many samples")
"""The kinds of bodies."""


def _kind(body: Any) -> str:
    return MANY if isinstance(body, dict) and "samples" in body else ONE


ScoreBody = Annotated[Annotated[Sample, Tag(ONE)] | Annotated[Samples, Tag(MANY)], Discriminator(_kind)]


def routes(service: RewardService) -> APIRouter:
    """Return the route of ``/score``."""
    router = APIRouter(tags=["Score"])

    @router.post("/score", response_model=Result | Results, responses=ERRORS)
    async def score(body: ScoreBody, request: Request) -> Response:
        """Score one sample, or many as `{"samples": [...]}`.

        A function that compares samples needs whole groups: give `group_sizes`, or the `group` of each sample.
        """
        given = body.samples if isinstance(body, Samples) else [body]
        for index, sample in enumerate(given):
            service.check_given(sample.model_fields_set, f"sample {index if sample.uid is None else sample.uid}")
        order, sizes = _grouped(given, body.group_sizes if isinstance(body, Samples) else None)
        if sizes is None and service.needs_groups:
            raise ServiceError(
                422,
                f"{service.name} compares the samples of a group: send all samples of a prompt in one request, with "
                "group_sizes or the group of each sample",
            )
        scored = await service.score_request(request, [_sample(given[index]) for index in order], sizes)
        results = dict(zip(order, scored, strict=True))
        shown = [_result(results[index]) for index in range(len(given))]
        return json_reply({"results": shown} if isinstance(body, Samples) else shown[0])

    return router


def _grouped(samples: Sequence[Sample], sizes: list[int] | None) -> tuple[list[int], list[int] | None]:
    """Return the order of the samples in which groups are neighbours, and the size of each group.

    Raises:
        ServiceError: the sizes do not fit, some samples have a group and others have none, or both are given (422).
    """
    order = list(range(len(samples)))
    named = [sample.group is not None for sample in samples]
    if not any(named):
        if sizes is not None and sum(sizes) != len(samples):
            raise ServiceError(
                422, f"group_sizes has {sum(sizes)} samples in all, but the request has {len(samples)} samples"
            )
        return order, sizes
    if sizes is not None:
        raise ServiceError(422, "group_sizes and the group of a sample exclude each other: give one of them")
    if not all(named):
        raise ServiceError(422, f"sample {named.index(False)} has no group, but other samples of the request have one")
    groups: dict[str | None, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    return [index for members in groups.values() for index in members], [len(members) for members in groups.values()]


def _sample(given: Sample) -> RewardSample:
    return RewardSample(
        given.solution_str,
        data_source=given.data_source,
        ground_truth=given.ground_truth,
        extra_info=given.extra_info,
        uid=given.uid,
        prompt=given.prompt,
        step=given.step,
    )


def _result(scored: Scored) -> dict[str, Any]:
    return {
        "uid": scored.uid,
        "score": scored.score,
        "outcome": str(scored.outcome),
        "error": scored.error,
        "reward_extra_info": scored.extra_info,
    }
