"""The requests of other trainers, sent as their clients send them, and the replies that these clients read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx
import pytest
import requests

from reward_loop.adapters.service.app import DIALECTS, check_dialects
from reward_loop.adapters.service.dialects import DialectOptions
from reward_loop.adapters.service.service import RewardService
from reward_loop.errors import ConfigError
from tests.adapters.services import app_of, client_of, post, ranks, scorer
from tests.servers import serving


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """The address of a service on a real socket."""
    service = RewardService(scorer())
    async with service, serving(app_of(service)) as address:
        yield address


def openrlhf_body(*responses: str) -> dict[str, Any]:
    return {
        "query": [f"<user>2+2<assistant>{response}" for response in responses],
        "prompts": ["<user>2+2<assistant>"] * len(responses),
        "labels": ["4"] * len(responses),
    }


def nemo_gym_body(text: str, **task: Any) -> dict[str, Any]:
    """Return what a simple agent of NeMo-Gym sends: the task, with the response of the model in OpenAI's format."""
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "2+2"}], "temperature": 1.0},
        "response": {"id": "resp_1", "object": "response", "model": "policy", "output": [message], "tools": []},
        **task,
    }


class TestOpenRLHF:
    async def test_the_client_of_openrlhf_reads_the_reward(self, url: str) -> None:
        timeout = aiohttp.ClientTimeout(total=180)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/openrlhf", json=openrlhf_body("4")) as response,
        ):
            response.raise_for_status()
            reply = await response.json()
        assert reply == {"rewards": [1.0], "scores": [1.0], "extra_logs": {"length": [1.0]}}

    async def test_the_older_client_of_openrlhf_sends_queries_only(self) -> None:
        async with client_of(scorer(lambda solution_str: len(solution_str))) as client:
            reply = await post(client, "/openrlhf", {"query": ["a", "bcd"]})
        assert reply["rewards"] == [1, 3]

    async def test_empty_lists_are_answered_since_all_but_the_first_of_several_urls_get_them(self) -> None:
        async with client_of() as client:
            reply = await post(client, "/openrlhf", openrlhf_body())
        assert reply == {"rewards": [], "scores": [], "extra_logs": {}}

    async def test_extra_logs_have_the_keys_of_all_samples(self) -> None:
        def with_keys(solution_str: str) -> dict[str, Any]:
            return {"score": 1, solution_str: 2, "both": True, "text": "x", "bad": float("inf")}

        async with client_of(scorer(with_keys)) as client:
            reply = await post(client, "/openrlhf", {"query": ["a", "b"]})
        assert reply["extra_logs"] == {"both": [1, 1]}

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"labels": ["4", "5"]}, "query has 1 items, but labels has 2"),
            ({"prompts": []}, "query has 1 items, but prompts has 0"),
            ({"labels": None}, "has no ground_truth, which equals"),
            ({"prompts": ["other"]}, "query 0 does not begin with its prompt"),
            ({"query": "text"}, "body.query: Input should be a valid list"),
            ({"query": [3]}, "body.query.0: Input should be a valid string"),
        ],
    )
    async def test_invalid_bodies_are_errors(self, change: dict[str, Any], message: str) -> None:
        async with client_of() as client:
            error = await post(client, "/openrlhf", openrlhf_body("4") | change, 422)
        assert message in error["error"]

    async def test_the_whole_query_may_be_the_solution(self) -> None:
        async with client_of(scorer(lambda solution_str: len(solution_str))) as client:
            body = {"query": ["abcd"], "prompts": ["x"]}
            assert (await post(client, "/openrlhf?solution=query", body))["rewards"] == [4]

    async def test_end_of_text_tokens_are_stripped(self) -> None:
        async with client_of(dialects=DialectOptions(strip=("<|im_end|>", "\n"))) as client:
            reply = await post(client, "/openrlhf", openrlhf_body("4<|im_end|>\n", "4", "<|im_end|>4"))
        assert reply["rewards"] == [1, 1, 0]

    @pytest.mark.parametrize(("answer", "outcome"), [("raise", "failed"), ("none", "unscored"), ("nan", "failed")])
    async def test_a_sample_without_a_score_is_an_error(self, answer: str, outcome: str) -> None:
        async with client_of() as client:
            error = await post(client, "/openrlhf", openrlhf_body("4", answer), 500)
        assert error["outcome"] == outcome
        assert "1 of 2 samples have no score" in error["error"]
        assert "=default -O default_score=NUMBER" in error["error"]
        assert not {"rewards", "scores"} & error.keys()

    async def test_the_users_number_replaces_a_missing_score(self) -> None:
        async with client_of(scorer(on_failed="default", default_score=-1)) as client:
            reply = await post(client, "/openrlhf", openrlhf_body("4", "raise"))
        assert reply["rewards"] == [1, -1]


class TestSlime:
    async def test_the_client_of_slime_reads_the_number(self, url: str) -> None:
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session,
            session.post(f"{url}/slime", json={"prompt": "2+2", "response": "4", "label": "4"}) as response,
        ):
            response.raise_for_status()
            assert await response.json() == 1.0

    async def test_the_prompt_may_be_chat_messages_and_is_extra_info(self) -> None:
        def score(solution_str: str, extra_info: dict[str, Any]) -> float:
            return float(extra_info["prompt"][0]["content"] == "2+2")

        async with client_of(scorer(score)) as client:
            body = {"prompt": [{"role": "user", "content": "2+2"}], "response": "4", "label": None}
            assert await post(client, "/slime", body) == 1.0

    @pytest.mark.parametrize("answer", ["raise", "none", "nan"])
    async def test_a_sample_without_a_score_is_an_error_that_slime_raises(self, url: str, answer: str) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/slime", json={"prompt": "2+2", "response": answer, "label": "4"}) as response,
        ):
            with pytest.raises(aiohttp.ClientResponseError):
                response.raise_for_status()

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({"prompt": "2+2", "response": "4"}, "has no ground_truth, which equals"),
            ({"prompt": "2+2", "label": "4"}, "body.response: Field required"),
            ({"response": "4", "label": "4"}, "body.prompt: Field required"),
            ({"prompt": 3, "response": "4", "label": "4"}, "body.prompt"),
        ],
    )
    async def test_invalid_bodies_are_errors(self, body: dict[str, Any], message: str) -> None:
        async with client_of() as client:
            assert message in (await post(client, "/slime", body, 422))["error"]


class TestLlamaFactory:
    async def test_the_client_of_llamafactory_reads_the_scores(self) -> None:
        service = RewardService(scorer(lambda solution_str: len(solution_str)))
        async with service, serving(app_of(service)) as url:
            payload = {"model": "model", "messages": ["a", "bcd"]}
            headers = {"Content-Type": "application/json"}
            response = await asyncio.to_thread(
                requests.post, f"{url}/llamafactory", json=payload, headers=headers, timeout=60
            )
        assert json.loads(response.text)["scores"] == [1.0, 3.0]

    async def test_an_error_has_no_scores(self) -> None:
        async with client_of(scorer(lambda solution_str: None)) as client:
            error = await post(client, "/llamafactory", {"model": "model", "messages": ["a"]}, 500)
        assert "scores" not in error

    @pytest.mark.parametrize(
        ("messages", "message"),
        [(["a"], "LLaMA-Factory sends no reference answers"), ([], "at least 1 item"), ("a", "valid list")],
    )
    async def test_requests_that_cannot_be_scored_are_errors(self, messages: Any, message: str) -> None:
        async with client_of() as client:
            error = await post(client, "/llamafactory", {"model": "model", "messages": messages}, 422)
        assert message in error["error"]


class TestNeMoGym:
    async def test_the_agent_of_nemo_gym_gets_its_request_back_with_the_reward(self, url: str) -> None:
        body = nemo_gym_body("4", expected_answer="4", agent_ref={"name": "simple"})
        async with aiohttp.ClientSession(url) as session:
            async with session.post("/seed_session", json={"responses_create_params": {}}) as response:
                response.raise_for_status()
                assert await response.json() == {}
            async with session.post("/verify", json=body) as response:
                response.raise_for_status()
                reply = await response.json()
        assert reply == body | {
            "reward": 1.0,
            "mask_sample": False,
            "failure_kind": None,
            "failure_reason": None,
            "reward_components": {"length": 1.0},
        }

    @pytest.mark.parametrize("prefix", ["/ng-rollout/r-7", "/ng-rollout/r-7/training-token-capture"])
    async def test_with_observability_the_paths_begin_with_the_rollout(self, prefix: str) -> None:
        async with client_of() as client:
            assert (await client.post(f"{prefix}/seed_session", json={})).status_code == 200
            reply = await post(client, f"{prefix}/verify", nemo_gym_body("raise", expected_answer="4"))
        assert reply["failure_reason"].startswith("sample r-7: ")

    async def test_stored_responses_may_be_verified_again(self) -> None:
        async with client_of() as client:
            assert (await client.get("/reverify_mode")).json() == "stateless"

    async def test_the_metrics_of_an_evaluation(self) -> None:
        replies = [
            {"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0, "mask_sample": False, "length": 4},
            {"_ng_task_index": 0, "_ng_rollout_index": 1, "reward": 0.0, "mask_sample": True, "failure_kind": "x"},
            {"_ng_task_index": 1, "_ng_rollout_index": 0, "reward": 0.5, "mask_sample": False, "length": 8},
        ]
        async with client_of() as client:
            found = await post(client, "/aggregate_metrics", {"verify_responses": replies})
            empty = await post(client, "/aggregate_metrics", {"verify_responses": []})
        assert found["key_metrics"] == {"mean/reward": 0.75, "mean/mask_sample": pytest.approx(1 / 3), "mean/length": 6}
        assert found["agent_metrics"]["std/length"] == pytest.approx(8**0.5)
        tasks = [
            (one["_ng_task_index"], one["num_rollouts"], one["mean/reward"]) for one in found["group_level_metrics"]
        ]
        assert tasks == [(0, 2, 1.0), (1, 1, 0.5)]
        assert empty == {"group_level_metrics": [], "agent_metrics": {}, "key_metrics": {}}

    @pytest.mark.parametrize(
        ("answer", "kind", "reason"),
        [
            ("raise", "verifier_error", "ValueError: five"),
            ("none", "reward_loop:unscored", "gave no score"),
            ("nan", "verifier_error", "not finite"),
        ],
    )
    async def test_a_sample_without_a_score_is_masked(self, answer: str, kind: str, reason: str) -> None:
        async with client_of() as client:
            reply = await post(client, "/verify", nemo_gym_body(answer, expected_answer="4"))
        assert (reply["mask_sample"], reply["failure_kind"]) == (True, kind)
        assert reason in reply["failure_reason"]

    async def test_the_users_number_is_not_masked_and_keeps_the_kind_of_failure(self) -> None:
        async with client_of(scorer(on_failed="default", default_score=-1)) as client:
            reply = await post(client, "/verify", nemo_gym_body("raise", expected_answer="4"))
        assert (reply["reward"], reply["mask_sample"], reply["failure_kind"]) == (-1, False, "verifier_error")

    async def test_the_field_of_the_ground_truth_is_an_option(self) -> None:
        options = DialectOptions(field_paths={"ground_truth": "verifier_metadata.answer"})
        async with client_of(dialects=options) as client:
            reply = await post(client, "/verify", nemo_gym_body("4", verifier_metadata={"answer": "4"}))
            assert reply["reward"] == 1
            error = await post(client, "/verify", nemo_gym_body("4", expected_answer="4"), 422)
        assert "no field 'verifier_metadata.answer'" in error["error"]
        assert "--field ground_truth=" in error["error"]

    async def test_task_and_prompt_are_extra_info_and_all_messages_are_the_solution(self) -> None:
        def score(solution_str: str, extra_info: dict[str, Any]) -> dict[str, Any]:
            return {"score": 1, "seen": [solution_str, extra_info["prompt"], extra_info["question"]] == expected}

        body = nemo_gym_body("first ", question="2+2")
        tool = {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c"}
        body["response"]["output"] += [tool, {"type": "message", "role": "assistant", "content": "second"}]
        expected = ["first second", body["responses_create_params"]["input"], "2+2"]
        async with client_of(scorer(score)) as client:
            assert (await post(client, "/verify", body))["reward_components"] == {"seen": 1.0}

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"response": {}}, "response.output: expected a list of objects"),
            ({"response": {"output": ["x"]}}, "response.output: expected a list of objects"),
            ({"response": "4"}, "body.response"),
            ({"responses_create_params": None}, "body.responses_create_params"),
            ({}, "no field 'ground_truth'"),
        ],
    )
    async def test_invalid_bodies_are_errors(self, change: dict[str, Any], message: str) -> None:
        async with client_of() as client:
            assert message in (await post(client, "/verify", nemo_gym_body("4") | change, 422))["error"]


async def test_functions_that_need_groups_serve_no_dialect() -> None:
    async with client_of(scorer(ranks, "group")) as client:
        error = await post(client, "/slime", {"prompt": "2+2", "response": "4", "label": "4"}, 404)
    assert "POST to one of /score" in error["error"]


@pytest.mark.parametrize("name", DIALECTS)
async def test_a_dialect_that_is_asked_for_refuses_functions_that_need_groups(name: str) -> None:
    service = RewardService(scorer(ranks, "group"))
    with pytest.raises(ConfigError, match=f"--dialect {name}: ranks .* compares the samples of a group"):
        check_dialects(service, [name])


async def test_an_unknown_dialect_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--dialect trl: unknown; choose from llamafactory"):
        check_dialects(RewardService(scorer()), ["trl"])


async def test_a_wrong_path_or_method_lists_the_right_ones() -> None:
    async with client_of() as client:
        assert "/openrlhf" in (await post(client, "/get_reward", {}, 404))["error"]
        answer = await client.get("/score")
    assert answer.status_code == httpx.codes.METHOD_NOT_ALLOWED
    assert "no GET /score" in answer.json()["error"]
