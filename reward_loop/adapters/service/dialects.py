"""The requests and replies of ``/score``, OpenRLHF, slime and LLaMA-Factory.

The classes of the trainers' bodies have the fields that their clients send; unknown fields are ignored, since a newer
version of a trainer may send more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Discriminator, Field, Tag

from reward_loop.adapters.service.replies import ERRORS, JsonBody, ServiceError, json_reply, numbers_of
from reward_loop.adapters.service.service import RewardService
from reward_loop.errors import ConfigError
from reward_loop.types import Outcome, RewardResult, RewardSample


@dataclass(frozen=True, slots=True)
class DialectOptions:
    """Options of the dialects."""

    strip: tuple[str, ...] = ()
    """Texts that are removed from the end of responses: end-of-text tokens, which some trainers send."""
    field_paths: Mapping[str, str] = field(default_factory=dict)
    """For NeMo-Gym: the field of a task that contains a part of the sample, as in ``reward-loop score --field``."""

    def __post_init__(self) -> None:
        # Every response ends in it, so `without_end` would not end.
        if "" in self.strip:
            raise ConfigError("--strip is empty: give the end-of-text token, or leave the option out")

    def without_end(self, text: str) -> str:
        """Return a response without the texts of `strip` at its end."""
        while ends := [end for end in self.strip if text.endswith(end)]:
            text = text.removesuffix(ends[0])
        return text


# --- `POST /score`: requests with one sample or many, and with groups


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


def score_route(app: FastAPI, service: RewardService) -> None:
    """Add the route ``/score``."""

    @app.post("/score", tags=["Score"], response_model=Result | Results, responses=ERRORS)
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


# --- OpenRLHF: `--reward.remote_url http://host:port/openrlhf` (`--remote_rm_url` in older versions)


class Rollouts(JsonBody):
    """Rollouts of OpenRLHF. The lists have equal lengths; they are empty at all but the first of several URLs."""

    query: list[str]
    """The prompts with their responses, special tokens included."""
    prompts: list[str] | None = None
    """The prompts alone. Without them, the whole query is the response."""
    labels: list[Any] | None = None
    """The reference answers."""


class Rewards(JsonBody):
    """The rewards of the rollouts, in their order."""

    rewards: list[float]
    """The scores."""
    scores: list[float]
    """The scores again: OpenRLHF filters groups by them."""
    extra_logs: dict[str, list[float]]
    """The numbers that the function returned in addition to the score, by key; ``NaN`` for a sample without the key."""


def openrlhf(app: FastAPI, service: RewardService, options: DialectOptions) -> None:
    """Add the route of OpenRLHF."""

    @app.post("/openrlhf", tags=["OpenRLHF"], response_model=Rewards, responses=ERRORS)
    async def score_openrlhf(
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
        scored = await service.score_request(request, samples)
        numbers = numbers_of(scored, "OpenRLHF")
        reply = {"rewards": numbers, "scores": numbers, "extra_logs": _extra_logs(scored)}
        # OpenRLHF makes tensors of the lists: NaN can be in one, null cannot. Its parser, Python's, accepts NaN.
        return Response(json.dumps(reply, separators=(",", ":")), media_type="application/json")


def _samples(body: Rollouts, service: RewardService, options: DialectOptions, solution: str) -> list[RewardSample]:
    for name, given in (("prompts", body.prompts), ("labels", body.labels)):
        if given is not None and len(given) != len(body.query):
            raise ServiceError(422, f"query has {len(body.query)} items, but {name} has {len(given)}")
    if body.query:
        parts = {"ground_truth": body.labels, "prompt": body.prompts}
        given = [name for name, values in parts.items() if values is not None]
        service.check_given(given, "the request", ": OpenRLHF sends it as labels")
    samples = []
    for index, query in enumerate(body.query):
        prompt = None if body.prompts is None else body.prompts[index]
        if prompt is not None and solution == "response":
            if not query.startswith(prompt):
                raise ServiceError(
                    422,
                    f"query {index} does not begin with its prompt, so the response in it is unknown: the tokenizer "
                    f"changed the prompt, or it was too long. /openrlhf?solution=query passes the whole query",
                )
            query = query.removeprefix(prompt)
        samples.append(
            RewardSample(
                options.without_end(query),
                ground_truth=None if body.labels is None else body.labels[index],
                extra_info={} if prompt is None else {"prompt": prompt},
                prompt=prompt,
                validate=None,
            )
        )
    return samples


def _extra_logs(results: list[RewardResult]) -> dict[str, list[float]]:
    keys = dict.fromkeys(key for result in results for key in result.components)
    return {key: [result.components.get(key, math.nan) for result in results] for key in keys}


# --- slime and miles: `--rm-type remote_rm --rm-url http://host:port/slime`


class Rollout(JsonBody):
    """A rollout of slime."""

    prompt: str | list[dict[str, Any]]
    """The prompt, as text or as chat messages."""
    response: str
    """The response."""
    label: Any = None
    """The reference answer."""


def slime(app: FastAPI, service: RewardService, options: DialectOptions) -> None:
    """Add the route of slime."""

    @app.post("/slime", tags=["slime, miles"], response_model=float, responses=ERRORS)
    async def score_slime(body: Rollout, request: Request) -> Response:
        """Score a rollout of slime. The reply is the score; a sample without a score is an error."""
        given = ("prompt",) if body.label is None else ("prompt", "ground_truth")
        service.check_given(given, "the request", ": slime sends it as label")
        sample = RewardSample(
            options.without_end(body.response),
            ground_truth=body.label,
            extra_info={"prompt": body.prompt},
            prompt=body.prompt,
            validate=None,
        )
        (number,) = numbers_of(await service.score_request(request, [sample]), "slime")
        return json_reply(number)


# --- LLaMA-Factory: `reward_model_type: api` and `reward_model: http://host:port/llamafactory`


class Messages(JsonBody):
    """Rollouts of LLaMA-Factory."""

    messages: list[str] = Field(min_length=1)
    """The prompts with their responses, as one text each, special tokens included. The function receives the whole
    text as `solution_str`."""


class Scores(JsonBody):
    """The scores of the rollouts, in their order."""

    scores: list[float]
    """The scores."""


def llamafactory(app: FastAPI, service: RewardService, options: DialectOptions) -> None:
    """Add the route of LLaMA-Factory."""

    @app.post("/llamafactory", tags=["LLaMA-Factory"], response_model=Scores, responses=ERRORS)
    async def score_llamafactory(body: Messages, request: Request) -> Response:
        """Score rollouts of LLaMA-Factory. A sample without a score is an error, since scores are numbers."""
        service.check_given((), "the request", ": LLaMA-Factory sends no reference answers")
        samples = [RewardSample(options.without_end(text), validate=None) for text in body.messages]
        scored = await service.score_request(request, samples)
        return json_reply({"scores": numbers_of(scored, "LLaMA-Factory")})
