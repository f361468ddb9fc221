"""NeMo-Gym: the routes of a resources server. With observability, their paths begin with the ID of the rollout."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from reward_loop._util.text import shorten
from reward_loop.adapters.service.dialects import DialectOptions
from reward_loop.adapters.service.replies import ERRORS, JsonBody, ServiceError, json_reply
from reward_loop.adapters.service.service import RewardService
from reward_loop.offline.fields import Fields
from reward_loop.offline.inputs import Row
from reward_loop.types import Outcome, RewardSample, finite_number

FAILURE_KINDS = {Outcome.FAILED: "verifier_error", Outcome.UNSCORED: "reward_loop:unscored"}
"""The names of failures: NeMo-Gym's own name, and one with a prefix, as it demands for names that it does not have."""


PREFIXES = ("", "/ng-rollout/{rollout_id}", "/ng-rollout/{rollout_id}/training-token-capture")
"""The paths below which NeMo-Gym's agents call a resources server."""

TASK_INDEX, ROLLOUT_INDEX = "_ng_task_index", "_ng_rollout_index"


class VerifyBody(JsonBody):
    """A finished rollout of a task of NeMo-Gym. Further fields are those of the task."""

    model_config = ConfigDict(extra="allow")

    responses_create_params: dict[str, Any]
    """The request for the response; its `input` is the prompt."""
    response: dict[str, Any]
    """The response, in the format of OpenAI's Responses API. The function receives the text of all messages of its
    `output` as `solution_str`."""


class VerifyReply(VerifyBody):
    """The body of the request, with the reward."""

    reward: float
    """The score. 0 if `mask_sample` is true, which excludes the sample."""
    mask_sample: bool
    """Whether the sample has no score, and must not be used."""
    failure_kind: str | None
    """*verifier_error*: the sample failed; *reward_loop:unscored*: the function returned `None`."""
    failure_reason: str | None
    """Why the sample has no score of the function."""
    reward_components: dict[str, float] = Field(default_factory=dict)
    """The numbers that the function returned in addition to the score."""


class AggregateBody(JsonBody):
    """The results of an evaluation."""

    verify_responses: list[dict[str, Any]]
    """The replies to `/verify`, without texts."""


def nemo_gym(app: FastAPI, service: RewardService, options: DialectOptions) -> None:
    """Add the routes of NeMo-Gym, below each of `PREFIXES`."""
    for prefix in PREFIXES:
        app.include_router(_routes(service, options), prefix=prefix, include_in_schema=not prefix)


def _routes(service: RewardService, options: DialectOptions) -> APIRouter:
    router = APIRouter(tags=["NeMo-Gym"])
    scorer = service.scorer
    fields = Fields(options.field_paths, data_source=service.data_source, requires=scorer.requires)

    @router.post("/seed_session")
    async def seed_session() -> Response:
        """Begin a session. NeMo-Gym's agents call this before each rollout; the service has no sessions."""
        return json_reply({})

    @router.post("/verify", response_model=VerifyReply, responses=ERRORS)
    async def verify(body: VerifyBody, request: Request) -> Response:
        """Score a rollout of NeMo-Gym. A sample without a score is masked."""
        sample = replace(_sample(body, fields), uid=request.path_params.get("rollout_id"))
        if sample.error is not None:
            raise ServiceError(422, f"the request has {sample.error}")
        (result,) = await service.score_request(request, [sample])
        reply = {
            "reward": result.reward or 0.0,
            "mask_sample": result.masked,
            "failure_kind": FAILURE_KINDS.get(result.outcome),
            "failure_reason": result.reason,
            "reward_components": result.components,
        }
        return json_reply(body.model_dump() | reply)

    @router.get("/reverify_mode")
    async def reverify_mode() -> Response:
        """Say that a stored response can be scored again: the service keeps no sessions."""
        return json_reply("stateless")

    @router.post("/aggregate_metrics", responses=ERRORS)
    async def aggregate_metrics(body: AggregateBody) -> Response:
        """Return mean, maximum, minimum, median and standard deviation of all numbers in replies, and by task.

        The rewards of masked samples are left out.
        """
        tasks: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for reply in body.verify_responses:
            # As without observability, where the index is left out.
            task = reply.get(TASK_INDEX) or 0
            if not isinstance(task, int):
                raise ServiceError(422, f"{TASK_INDEX} is {shorten(task)}, not the number of a task")
            tasks[task].append(reply)
        overall = _statistics(body.verify_responses)
        return json_reply(
            {
                "group_level_metrics": [
                    {TASK_INDEX: task, "num_rollouts": len(replies), **_statistics(replies)}
                    for task, replies in sorted(tasks.items())
                ],
                "agent_metrics": overall,
                "key_metrics": {name: value for name, value in overall.items() if name.startswith("mean/")},
            }
        )

    return router


def _statistics(replies: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    numbers: dict[str, list[float]] = defaultdict(list)
    for reply in replies:
        for name, value in reply.items():
            if name in (TASK_INDEX, ROLLOUT_INDEX) or (name == "reward" and reply.get("mask_sample")):
                continue
            number = finite_number(value) if isinstance(value, bool | int | float) else None
            if number is not None:
                numbers[name].append(number)
    found: dict[str, float] = {}
    for name, values in numbers.items():
        found[f"mean/{name}"] = statistics.fmean(values)
        found[f"max/{name}"] = max(values)
        found[f"min/{name}"] = min(values)
        found[f"median/{name}"] = statistics.median(values)
        found[f"std/{name}"] = statistics.stdev(values) if len(values) > 1 else 0.0
    return found


def _sample(body: VerifyBody, fields: Fields) -> RewardSample:
    """Return the sample of a request. If it lacks a field that the function requires, the sample has an error."""
    task = dict(body.model_extra or {})
    prompt = body.responses_create_params.get("input")
    # `solution_str` comes last: a field of the task must not replace the response.
    columns = {"prompt": prompt, "extra_info": {"prompt": prompt, **task}, **task, "solution_str": _text(body.response)}
    if "expected_answer" in task:
        columns.setdefault("ground_truth", task["expected_answer"])
    return replace(fields.to_sample(Row("the request", columns)), prompt=prompt)


def _text(response: Mapping[str, Any]) -> str:
    """Return the text of the messages in a response.

    Raises:
        ServiceError: the response has no list of items (422).
    """
    output = response.get("output")
    if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
        raise ServiceError(422, "response.output: expected a list of objects, as in OpenAI's Responses API")
    parts = []
    for item in output:
        content = item.get("content") if item.get("type", "message") == "message" else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                parts.append(part["text"])
        if isinstance(content, str):
            parts.append(content)
    return "".join(parts)
