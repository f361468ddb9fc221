"""Requests to `/score`: one sample, many, groups; outcomes; invalid bodies."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from reward_loop import RewardSample
from reward_loop.records.reader import RecordsReader
from tests.adapters.services import client_of, post, ranks, scorer


async def test_one_sample() -> None:
    async with client_of() as client:
        result = await post(client, "/score", {"solution_str": "4", "ground_truth": "4", "uid": "a"})
    assert (result["uid"], result["score"], result["outcome"], result["error"]) == ("a", 1.0, "scored", None)
    assert result["reward_extra_info"]["length"] == 1


async def test_many_samples_have_results_in_their_order_with_separate_outcomes() -> None:
    answers = ["4", "raise", "none", "nan", "5"]
    async with client_of() as client:
        samples = [{"solution_str": answer, "ground_truth": "4"} for answer in answers]
        results = (await post(client, "/score", {"samples": samples}))["results"]
    assert [result["score"] for result in results] == [1.0, None, None, None, 0.0]
    assert [result["outcome"] for result in results] == ["scored", "failed", "unscored", "failed", "scored"]
    assert "ValueError: five" in results[1]["error"]
    assert "gave no score" in results[2]["error"]
    assert "not finite" in results[3]["error"]
    assert len({result["uid"] for result in results}) == 5


async def test_the_policy_default_gives_the_users_number_and_keeps_the_outcome() -> None:
    async with client_of(scorer(on_failed="default", default_score=-1)) as client:
        result = await post(client, "/score", {"solution_str": "raise", "ground_truth": "4"})
    assert (result["score"], result["outcome"]) == (-1.0, "failed")


async def test_the_policy_raise_is_an_error_with_the_outcome() -> None:
    async with client_of(scorer(on_failed="raise", on_unscored="raise")) as client:
        for answer, outcome in (("raise", "failed"), ("none", "unscored")):
            error = await post(client, "/score", {"solution_str": answer, "ground_truth": "4"}, 500)
            assert error["outcome"] == outcome
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
    assert (info["nan"], info["set"], info["bytes"]) == (None, [1], "x")


async def test_a_manager_that_returns_nan_is_not_answered_with_a_number() -> None:
    made = scorer()

    async def run_single(sample: RewardSample) -> Any:
        return {"reward_score": float("nan"), "reward_extra_info": {}}

    made.manager.run_single = run_single
    async with client_of(made) as client:
        result = await post(client, "/score", {"solution_str": "4", "ground_truth": "4"})
    assert (result["score"], result["outcome"]) == (None, "failed")
    assert "not a finite number" in result["error"]


async def test_a_manager_that_raises_is_an_error() -> None:
    made = scorer()

    async def run_single(sample: RewardSample) -> Any:
        raise KeyError("x")

    made.manager.run_single = run_single
    async with client_of(made) as client:
        error = await post(client, "/score", {"solution_str": "4", "ground_truth": "4"}, 500)
    assert "run_single raised KeyError" in error["error"]


@pytest.mark.parametrize(
    "body",
    [
        {"samples": [{"solution_str": text} for text in ("aaa", "b", "cc", "d", "ee")], "group_sizes": [3, 2]},
        {
            "samples": [
                {"solution_str": text, "group": group}
                for text, group in (("aaa", "x"), ("d", "y"), ("b", "x"), ("ee", "y"), ("cc", "x"))
            ]
        },
    ],
)
async def test_groups_are_scored_together(body: dict[str, Any]) -> None:
    async with client_of(scorer(ranks, "group")) as client:
        results = (await post(client, "/score", body))["results"]
    scores = {sample["solution_str"]: result["score"] for sample, result in zip(body["samples"], results, strict=True)}
    assert scores == {"aaa": 2, "b": 0, "cc": 1, "d": 0, "ee": 1}


async def test_equal_group_names_in_two_requests_are_two_groups() -> None:
    async with client_of(scorer(ranks, "group")) as client:
        for texts in (("a", "bb"), ("ccc", "dddd")):
            body = {"samples": [{"solution_str": text, "group": "x"} for text in texts]}
            results = (await post(client, "/score", body))["results"]
            assert [result["score"] for result in results] == [0, 1]


async def test_post_process_scores_runs_on_each_group() -> None:
    class Judge:
        def compute_score(self, solution_str: str) -> float:
            return float(solution_str)

        def post_process_scores(self, scores: list[float]) -> list[float]:
            return [score - max(scores) for score in scores]

    async with client_of(scorer(Judge())) as client:
        samples = [{"solution_str": text} for text in "1357"]
        results = (await post(client, "/score", {"samples": samples, "group_sizes": [2, 2]}))["results"]
        assert [result["score"] for result in results] == [-2, 0, -2, 0]
        error = await post(client, "/score", {"samples": samples}, 422)
    assert "group_sizes" in error["error"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "compares the samples of a group"),
        ({"group_sizes": [2, 2]}, "4 samples in all, but the request has 3"),
        ({"group_sizes": [0, 3]}, "group_sizes.0"),
        ({"group_sizes": [70]}, "70 samples in all"),
    ],
)
async def test_groups_that_do_not_fit_are_an_error(extra: dict[str, Any], message: str) -> None:
    async with client_of(scorer(ranks, "group")) as client:
        body = {"samples": [{"solution_str": text} for text in "abc"], **extra}
        assert message in (await post(client, "/score", body, 422))["error"]


async def test_a_group_that_is_larger_than_the_concurrency_is_an_error() -> None:
    async with client_of(scorer(ranks, "group"), concurrency=2) as client:
        body = {"samples": [{"solution_str": text} for text in "abc"], "group_sizes": [3]}
        assert "concurrency must be at least 3" in (await post(client, "/score", body, 422))["error"]


@pytest.mark.parametrize(
    ("groups", "sizes", "message"),
    [
        (["x", None], None, "sample 1 has no group"),
        (["x", "x"], [2], "exclude each other"),
    ],
)
async def test_groups_that_contradict_are_an_error(groups: list[Any], sizes: Any, message: str) -> None:
    samples = [{"solution_str": "4", "ground_truth": "4", "group": group} for group in groups]
    async with client_of() as client:
        error = await post(client, "/score", {"samples": samples, "group_sizes": sizes}, 422)
    assert message in error["error"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "body.solution_str: Field required"),
        ({"solution": "4"}, "body.solution: Extra inputs are not permitted"),
        ({"solution_str": 4}, "body.solution_str: Input should be a valid string"),
        ({"solution_str": "4"}, "sample 0 has no ground_truth, which equals"),
        ({"samples": []}, "body.samples: List should have at least 1 item"),
        ({"samples": [{"solution_str": "4", "ground_truth": 1}, {"ground_truth": 1}]}, "body.samples.1.solution_str"),
        ({"samples": [{"solution_str": "4", "uid": "b"}]}, "sample b has no ground_truth"),
        ({"samples": 3}, "body.samples: Input should be a valid list"),
        ([], "body: Input should be a valid dictionary"),
        (None, "body"),
    ],
)
async def test_invalid_bodies_are_errors_that_name_the_field(body: Any, message: str) -> None:
    async with client_of() as client:
        assert message in (await post(client, "/score", body, 422))["error"]


async def test_many_problems_are_cut() -> None:
    async with client_of() as client:
        error = (await post(client, "/score", {"samples": [{}] * 20}, 422))["error"]
    assert error.endswith("and 15 more")


@pytest.mark.parametrize("content", [b"{", b"", b"\xff", b'{"solution_str": "4",}', b"[" * 100_000])
async def test_a_body_that_is_not_json_is_an_error(content: bytes) -> None:
    async with client_of() as client:
        answer = await client.post("/score", content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]


async def test_a_required_data_source_may_be_an_option() -> None:
    def by_source(data_source: str, solution_str: str) -> float:
        return float(data_source == "gsm8k")

    async with client_of(scorer(by_source)) as client:
        assert "--data-source" in (await post(client, "/score", {"solution_str": "4"}, 422))["error"]
        assert (await post(client, "/score", {"solution_str": "4", "data_source": "gsm8k"}))["score"] == 1
    async with client_of(scorer(by_source), data_source="gsm8k") as client:
        assert (await post(client, "/score", {"solution_str": "4"}))["score"] == 1
        assert (await post(client, "/score", {"solution_str": "4", "data_source": "math"}))["score"] == 0


async def test_samples_are_recorded_with_group_step_and_prompt(tmp_path: Any) -> None:
    made = scorer(log_dir=str(tmp_path))
    async with client_of(made) as client:
        sample = {"solution_str": "4", "ground_truth": "4", "prompt": "2+2", "step": 3, "group": "x"}
        await post(client, "/score", {"samples": [{**sample, "uid": "a"}, {**sample, "uid": "b"}]})
    made.manager.records.flush()
    rows = list(RecordsReader(tmp_path).rows())
    assert {row["uid"] for row in rows} == {"a", "b"}
    assert {row["step"] for row in rows} == {3}
    assert len({row["group"] for row in rows}) == 1


async def test_the_api_page_describes_every_field(tmp_path: Any) -> None:
    async with client_of() as client:
        schema = (await client.get("/openapi.json")).json()
        assert (await client.get("/docs")).status_code == httpx.codes.OK
    assert {"/score", "/openrlhf", "/slime", "/llamafactory", "/verify", "/health", "/ready", "/metrics"} <= set(
        schema["paths"]
    )
    for name, model in schema["components"]["schemas"].items():
        if name not in ("HTTPValidationError", "ValidationError", "Outcome"):
            assert model["description"], name
            for field, described in model["properties"].items():
                assert described.get("description"), f"{name}.{field}"
