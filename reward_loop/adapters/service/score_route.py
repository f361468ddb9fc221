"""``POST /score``: requests with one sample or many, and with groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Discriminator, Field, Tag

from reward_loop.adapters.service.replies import ERRORS, JsonBody, ServiceError, json_reply
from reward_loop.adapters.service.service import RewardService
from reward_loop.types import Outcome, RewardResult, RewardSample

__all__ = ["KINDS", "routes"]


class Sample(JsonBody):
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
    """The prompt, as text or as chat messages."""
    uid: str | None = None
    """The name of the sample in errors and records. By default a unique name."""
    step: int | None = None
    """The training step, which functions receive as `global_steps`."""
    response_ids: list[int] | None = None
    """The token ids of the response."""
    response_length: int | None = None
    """The number of tokens of the response; by default that of `response_ids`."""
    is_truncated: bool | None = None
    """Whether the response was cut off at the largest length."""
    training_progress: float | None = None
    """The share of the run that is done, from 0 to 1."""
    validate_: bool = Field(default=False, alias="validate")
    """Whether the sample belongs to a validation."""
    group: str | None = None
    """The group: samples of a request with the same text are responses to the same prompt."""

    def given(self) -> set[str]:
        """Return the names of the fields that the request has, and of those that follow from them."""
        names = {"validate" if name == "validate_" else name for name in self.model_fields_set}
        return names | ({"response_length"} if "response_ids" in names else set())

    def to_sample(self) -> RewardSample:
        """Return the sample without its group, which the agent sets."""
        fields = self.model_dump(exclude={"group"}, by_alias=True)
        if self.response_length is None and self.response_ids is not None:
            fields["response_length"] = len(self.response_ids)
        return RewardSample(**fields)


class Samples(JsonBody):
    """Many samples. They are scored concurrently; the reply has their results in the same order."""

    model_config = ConfigDict(extra="forbid")

    samples: list[Sample] = Field(min_length=1)
    """The samples."""


class Result(JsonBody):
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


class Results(JsonBody):
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

        A function that compares samples needs whole groups: give the `group` of each sample.
        """
        given = body.samples if isinstance(body, Samples) else [body]
        for index, sample in enumerate(given):
            service.check_given(sample.given(), f"sample {sample.uid or index}")
        groups = _members(given, service)
        order = [index for members in groups for index in members]
        samples = service.named([given[index].to_sample() for index in order])
        scored = await service.score_request(request, samples, [len(members) for members in groups])
        shown = dict(zip(order, map(_result, samples, scored), strict=True))
        return json_reply({"results": [shown[i] for i in range(len(given))]} if isinstance(body, Samples) else shown[0])

    return router


def _members(samples: Sequence[Sample], service: RewardService) -> list[list[int]]:
    """Return the indices of the samples of each group; samples without a group are groups of their own.

    Raises:
        ServiceError: a sample has no group, and the function compares the samples of a group (422).
    """
    groups: dict[str | int, list[int]] = {}
    for index, sample in enumerate(samples):
        if sample.group is None and service.needs_groups:
            raise ServiceError(
                422,
                f"sample {index} has no group, and {service.name} compares the samples of a group: send all samples of "
                "a prompt in one request, with the same group",
            )
        # An index is never equal to a name, which is text.
        groups.setdefault(index if sample.group is None else sample.group, []).append(index)
    return list(groups.values())


def _result(sample: RewardSample, result: RewardResult) -> dict[str, Any]:
    return {
        "uid": sample.uid,
        "score": result.reward,
        "outcome": str(result.outcome),
        "error": result.reason,
        "reward_extra_info": result.to_reward()["reward_extra_info"],
    }
