"""Requests to `/score`: one sample, many, groups; outcomes; invalid bodies."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from reward_loop import RewardSample
from reward_loop.records.reader import RecordsReader
from tests.adapters.rewards import Centred
from tests.adapters.services import client_of, post, ranks, scorer
from tests.scoring.logging_functions import logging_function


def sample(answer: str, **fields: Any) -> dict[str, Any]:
    return {"solution_str": answer, "ground_truth": "4", **fields}


def in_groups(*samples: tuple[str, str]) -> dict[str, Any]:
    return {"samples": [{"solution_str": text, "group": group} for text, group in samples]}


async def test_samples_have_results_in_their_order_with_separate_outcomes() -> None:
    async with client_of() as client:
        one = await post(client, "/score", sample("4", uid="a"))
        many = await post(client, "/score", {"samples": list(map(sample, ("4", "raise", "none", "nan", "5")))})
    assert (one["uid"], one["score"], one["outcome"], one["error"]) == ("a", 1.0, "scored", None)
    assert one["reward_extra_info"]["length"] == 1
    results = many["results"]
    assert [result["score"] for result in results] == [1.0, None, None, None, 0.0]
    assert [result["outcome"] for result in results] == ["scored", "failed", "unscored", "failed", "scored"]
    for result, reason in zip(results[1:4], ("ValueError: five", "gave no score", "not finite"), strict=True):
        assert reason in result["error"]
    assert len({result["uid"] for result in results}) == 5


async def test_the_policies_give_a_number_or_an_error_with_the_outcome() -> None:
    async with client_of(scorer(on_failed="default", default_score=-1, on_unscored="raise")) as client:
        result = await post(client, "/score", sample("raise"))
        error = await post(client, "/score", sample("none"), 500)
    assert (result["score"], result["outcome"]) == (-1.0, "failed")
    assert error["outcome"] == "unscored"
    assert "equals" in error["error"]


async def test_functions_that_exceed_the_time_limit_fail() -> None:
    async def hangs(solution_str: str) -> float:
        await asyncio.Event().wait()
        return 1.0

    async with client_of(scorer(hangs, timeout=0.05)) as client:
        result = await post(client, "/score", {"solution_str": "4"})
    assert (result["score"], result["outcome"]) == (None, "failed")
    assert "deadline" in result["error"]


async def test_extra_info_that_json_lacks_is_converted() -> None:
    def with_strange_values(solution_str: str) -> dict[str, Any]:
        return {"score": 1, "nan": float("nan"), "set": {1}, "bytes": b"x"}

    async with client_of(scorer(with_strange_values)) as client:
        info = (await post(client, "/score", {"solution_str": "4"}))["reward_extra_info"]
    assert (info["nan"], info["set"], info["bytes"]) == (None, [1], {"$bytes": "eA=="})


async def test_a_manager_that_raises_or_returns_nan_is_not_answered_with_a_number() -> None:
    made = scorer()

    async def run_single(sample: RewardSample) -> Any:
        if sample.solution_str == "raise":
            raise KeyError("x")
        return {"reward_score": float("nan"), "reward_extra_info": {}}

    made.manager.run_single = run_single
    async with client_of(made) as client:
        result = await post(client, "/score", sample("4"))
        error = await post(client, "/score", sample("raise"), 500)
    assert (result["score"], result["outcome"]) == (None, "failed")
    assert "not a finite number" in result["error"]
    assert "run_single raised KeyError" in error["error"]


async def test_the_samples_of_a_group_are_scored_together_in_any_order() -> None:
    body = in_groups(("aaa", "x"), ("d", "y"), ("b", "x"), ("ee", "y"), ("cc", "x"))
    async with client_of(scorer(ranks, "group")) as client:
        for _ in range(2):  # the groups of another request with the same names are other groups
            results = (await post(client, "/score", body))["results"]
            assert [result["score"] for result in results] == [2, 0, 0, 1, 1]
        larger = in_groups(*[("a", "x")] * 3)
        error = await post(client, "/score", {"samples": [{"solution_str": "a"}]}, 422)
    assert "sample 0 has no group, and ranks" in error["error"]
    async with client_of(scorer(ranks, "group"), concurrency=2) as client:
        assert "concurrency must be at least 3" in (await post(client, "/score", larger, 422))["error"]


async def test_post_process_scores_runs_on_each_group() -> None:
    async with client_of(scorer(Centred)) as client:
        results = (await post(client, "/score", in_groups(("a", "x"), ("bb", "y"), ("ccc", "x"))))["results"]
        assert [result["score"] for result in results] == [-1, 0, 1]
        assert "Centred" in (await post(client, "/score", {"solution_str": "a"}, 422))["error"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "body.solution_str: Field required"),
        ({"solution": "4"}, "body.solution: Extra inputs are not permitted"),
        ({"solution_str": 4}, "body.solution_str: Input should be a valid string"),
        ({"solution_str": "4"}, "sample 0 has no ground_truth, which equals"),
        ({"samples": []}, "body.samples: List should have at least 1 item"),
        ({"samples": [sample("4"), {"ground_truth": 1}]}, "body.samples.1.solution_str"),
        ({"samples": [{"solution_str": "4", "uid": "b"}]}, "sample b has no ground_truth"),
        ({"samples": [{}] * 20}, "and 15 more"),
        ([], "body: Input should be a valid dictionary"),
    ],
)
async def test_invalid_bodies_are_errors_that_name_the_field(body: Any, message: str) -> None:
    async with client_of() as client:
        assert message in (await post(client, "/score", body, 422))["error"]


@pytest.mark.parametrize("content", [b"{", b"", b"\xff", b'{"solution_str": "4",}', b"[" * 100_000])
async def test_a_body_that_is_not_json_is_an_error(content: bytes) -> None:
    async with client_of() as client:
        answer = await client.post("/score", content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]


async def test_a_required_data_source_may_be_an_option() -> None:
    def by_source(data_source: str, solution_str: str) -> float:
        return float(data_source == "gsm8k")

    bare, math = {"solution_str": "4"}, {"solution_str": "4", "data_source": "math"}
    async with client_of(scorer(by_source)) as client:
        assert "--data-source" in (await post(client, "/score", bare, 422))["error"]
        assert (await post(client, "/score", math))["score"] == 0
    async with client_of(scorer(by_source), data_source="gsm8k") as client:
        assert [(await post(client, "/score", body))["score"] for body in (bare, math)] == [1, 0]


async def test_samples_are_recorded_with_group_step_and_prompt(tmp_path: Path) -> None:
    made = scorer(log_dir=str(tmp_path))
    async with client_of(made) as client:
        samples = [sample("4", prompt="2+2", step=3, group="x", uid=uid) for uid in "ab"]
        await post(client, "/score", {"samples": samples})
    made.manager.records.flush()
    rows = list(RecordsReader(tmp_path).rows())
    assert {(row["uid"], row["step"]) for row in rows} == {("a", 3), ("b", 3)}
    assert len({row["group"] for row in rows}) == 1


async def test_the_api_page_describes_every_field() -> None:
    async with client_of() as client:
        schema = (await client.get("/openapi.json")).json()
        page = (await client.get("/docs")).text
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", page)  # it needs no network
    assert all(f"<code>{name}</code>" in page for name in schema["components"]["schemas"]["Sample"]["properties"])
    assert all(f"POST {path}</code>" in page for path in ("/score", "/slime", "/openrlhf", "/llamafactory", "/verify"))
    paths = {"/score", "/openrlhf", "/slime", "/llamafactory", "/verify", "/health", "/ready", "/metrics"}
    assert paths <= set(schema["paths"])
    for name, model in schema["components"]["schemas"].items():
        if name not in ("HTTPValidationError", "ValidationError", "Outcome"):
            assert model["description"], name
            for field, described in model["properties"].items():
                assert described.get("description"), f"{name}.{field}"


ASKED = {
    "prompt": "2+2=",
    "response_ids": [19, 2],
    "response_length": 2,
    "is_truncated": False,
    "global_steps": 3,
    "training_progress": 0.5,
    "validate": True,
}


@pytest.mark.parametrize("name", ASKED)
async def test_requests_give_the_arguments_that_a_function_asks_for(name: str) -> None:
    seen: list[Any] = []
    function = logging_function(name, seen)
    body = {"solution_str": "4", **{"step" if key == "global_steps" else key: value for key, value in ASKED.items()}}
    del body["response_length"]  # of `response_ids`
    async with client_of(scorer(function)) as client:
        await post(client, "/score", body)
        error = await post(client, "/score", {"solution_str": "4"}, 422)
        dialect = await post(client, "/llamafactory", {"messages": ["4"]}, 422)
    assert seen == [ASKED[name]]
    for reply in (error, dialect):
        assert f"has no {name}, which" in reply["error"]
        assert "send it to /score as " in reply["error"]
