"""The requests of other trainers, as their clients send them, and the replies that these clients read."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from reward_loop.adapters.service.dialects import DialectOptions
from reward_loop.errors import ConfigError
from tests.adapters.services import client_of, post, ranks, scorer


def openrlhf(*responses: str, **fields: Any) -> dict[str, Any]:
    return {
        "query": [f"<user>2+2<assistant>{response}" for response in responses],
        "prompts": ["<user>2+2<assistant>"] * len(responses),
        "labels": ["4"] * len(responses),
        **fields,
    }


def slime(response: str = "4", **fields: Any) -> dict[str, Any]:
    return {"prompt": "2+2", "response": response, "label": "4", **fields}


def llamafactory(messages: Any) -> dict[str, Any]:
    return {"model": "model", "messages": messages}


def nemo_gym(text: str = "4", **task: Any) -> dict[str, Any]:
    """Return what a simple agent of NeMo-Gym sends: the task, with the response of the model in OpenAI's format."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "2+2"}], "temperature": 1.0},
        "response": {"id": "resp_1", "object": "response", "model": "policy", "output": [message], "tools": []},
        **task,
    }


TASK = nemo_gym(expected_answer="4", agent_ref={"name": "simple"})
UNMASKED = {"mask_sample": False, "failure_kind": None, "failure_reason": None, "reward_components": {"length": 1.0}}


@pytest.mark.parametrize(
    ("path", "body", "reply"),
    [
        ("/openrlhf", openrlhf("4"), {"rewards": [1.0], "scores": [1.0], "extra_logs": {"length": [1.0]}}),
        # All but the first of several URLs get empty lists.
        ("/openrlhf", openrlhf(), {"rewards": [], "scores": [], "extra_logs": {}}),
        ("/slime", slime("4"), 1.0),
        ("/verify", TASK, TASK | UNMASKED | {"reward": 1.0}),
        ("/seed_session", {"responses_create_params": {}}, {}),
    ],
)
async def test_the_reply_is_what_the_client_of_the_trainer_reads(path: str, body: Any, reply: Any) -> None:
    async with client_of() as client:
        assert await post(client, path, body) == reply


@pytest.mark.parametrize(
    ("path", "body", "scores"),
    [
        ("/llamafactory", llamafactory(["a", "bcd"]), {"scores": [1.0, 3.0]}),
        ("/openrlhf", {"query": ["a", "bcd"]}, {"rewards": [1.0, 3.0]}),  # an older client sends no prompts
        ("/openrlhf?solution=query", {"query": ["abcd"], "prompts": ["x"]}, {"rewards": [4.0]}),
    ],
)
async def test_the_solution_is_the_whole_text_of_the_request(path: str, body: Any, scores: Any) -> None:
    async with client_of(scorer(lambda solution_str: len(solution_str))) as client:
        assert (await post(client, path, body)).items() >= scores.items()


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/openrlhf", openrlhf("4", labels=["4", "5"]), "query has 1 items, but labels has 2"),
        ("/openrlhf", openrlhf("4", prompts=[]), "query has 1 items, but prompts has 0"),
        ("/openrlhf", openrlhf("4", labels=None), "has no ground_truth, which equals"),
        ("/openrlhf", openrlhf("4", prompts=["other"]), "query 0 does not begin with its prompt"),
        ("/openrlhf", openrlhf("4", query=[3]), "body.query.0: Input should be a valid string"),
        ("/slime", {"prompt": "2+2", "response": "4"}, "has no ground_truth, which equals"),
        ("/slime", slime(prompt=3), "body.prompt"),
        ("/llamafactory", llamafactory(["a"]), "LLaMA-Factory sends no reference answers"),
        ("/llamafactory", llamafactory([]), "at least 1 item"),
        ("/verify", nemo_gym(response={}), "response.output: expected a list of objects"),
        ("/verify", nemo_gym(response={"output": ["x"]}), "response.output: expected a list of objects"),
        ("/verify", nemo_gym(), "no field 'ground_truth'"),
    ],
)
async def test_invalid_bodies_are_errors(path: str, body: Any, message: str) -> None:
    async with client_of() as client:
        assert message in (await post(client, path, body, 422))["error"]


@pytest.mark.parametrize(
    ("answer", "outcome", "reason"),
    [("raise", "failed", "ValueError: five"), ("none", "unscored", "gave no score"), ("nan", "failed", "not finite")],
)
async def test_a_sample_without_a_score_is_an_error_or_masked(answer: str, outcome: str, reason: str) -> None:
    async with client_of() as client:
        for path, body in (("/openrlhf", openrlhf("4", answer)), ("/slime", slime(answer))):
            error = await post(client, path, body, 500)
            assert error["outcome"] == outcome
            assert "of 2 samples have no score" in error["error"] or path == "/slime"
            assert "=default -O default_score=NUMBER" in error["error"]
            assert not {"rewards", "scores"} & error.keys()
        reply = await post(client, "/verify", nemo_gym(answer, expected_answer="4"))
    assert reply["mask_sample"] is True
    assert reply["failure_kind"] == {"failed": "verifier_error", "unscored": "reward_loop:unscored"}[outcome]
    assert reason in reply["failure_reason"]


async def test_the_users_number_replaces_a_missing_score() -> None:
    async with client_of(scorer(on_failed="default", default_score=-1)) as client:
        assert (await post(client, "/openrlhf", openrlhf("4", "raise")))["rewards"] == [1, -1]
        reply = await post(client, "/verify", nemo_gym("raise", expected_answer="4"))
    assert (reply["reward"], reply["mask_sample"], reply["failure_kind"]) == (-1, False, "verifier_error")


async def test_extra_logs_of_openrlhf_have_every_key_with_nan_where_a_sample_lacks_it() -> None:
    def with_keys(solution_str: str) -> dict[str, Any]:
        return {"score": 1, solution_str: 2, "both": True, "text": "x", "bad": float("inf")}

    async with client_of(scorer(with_keys)) as client:
        logs = (await post(client, "/openrlhf", {"query": ["a", "b"]}))["extra_logs"]
    nan = pytest.approx(math.nan, nan_ok=True)
    assert logs == {"both": [1, 1], "a": [2, nan], "b": [nan, 2]}


async def test_end_of_text_tokens_are_stripped() -> None:
    async with client_of(dialects=DialectOptions(strip=("<|im_end|>", "\n"))) as client:
        reply = await post(client, "/openrlhf", openrlhf("4<|im_end|>\n", "4", "<|im_end|>4"))
    assert reply["rewards"] == [1, 1, 0]


def test_an_empty_text_is_no_end_of_a_response() -> None:
    with pytest.raises(ConfigError, match="--strip is empty"):
        DialectOptions(strip=("<|im_end|>", ""))


async def test_the_prompt_of_slime_may_be_chat_messages_and_is_extra_info() -> None:
    def score(solution_str: str, extra_info: dict[str, Any]) -> float:
        return float(extra_info["prompt"][0]["content"] == "2+2")

    async with client_of(scorer(score)) as client:
        assert await post(client, "/slime", slime(prompt=[{"role": "user", "content": "2+2"}], label=None)) == 1.0


async def test_the_task_of_nemo_gym_is_extra_info_and_all_messages_are_the_solution() -> None:
    def score(solution_str: str, extra_info: dict[str, Any]) -> dict[str, Any]:
        return {"score": 1, "seen": [solution_str, extra_info["prompt"], extra_info["question"]] == expected}

    body = nemo_gym("first ", question="2+2")
    tool = {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c"}
    body["response"]["output"] += [tool, {"type": "message", "role": "assistant", "content": "second"}]
    expected = ["first second", body["responses_create_params"]["input"], "2+2"]
    async with client_of(scorer(score)) as client:
        assert (await post(client, "/verify", body))["reward_components"] == {"seen": 1.0}


async def test_the_field_of_the_ground_truth_of_nemo_gym_is_an_option() -> None:
    options = DialectOptions(field_paths={"ground_truth": "verifier_metadata.answer"})
    async with client_of(dialects=options) as client:
        assert (await post(client, "/verify", nemo_gym(verifier_metadata={"answer": "4"})))["reward"] == 1
        error = await post(client, "/verify", nemo_gym(expected_answer="4"), 422)
    assert "no field 'verifier_metadata.answer'" in error["error"]
    assert "--field ground_truth=" in error["error"]


@pytest.mark.parametrize("prefix", ["/ng-rollout/r-7", "/ng-rollout/r-7/training-token-capture"])
async def test_with_observability_the_paths_of_nemo_gym_begin_with_the_rollout(prefix: str) -> None:
    async with client_of() as client:
        assert await post(client, f"{prefix}/seed_session", {}) == {}
        reply = await post(client, f"{prefix}/verify", nemo_gym("raise", expected_answer="4"))
    assert reply["failure_reason"].startswith("sample r-7: ")


async def test_nemo_gym_gets_the_metrics_of_an_evaluation_and_may_verify_stored_responses_again() -> None:
    replies = [
        {"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0, "mask_sample": False, "length": 4},
        {"_ng_task_index": 0, "_ng_rollout_index": 1, "reward": 0.0, "mask_sample": True, "failure_kind": "x"},
        {"_ng_task_index": 1, "_ng_rollout_index": 0, "reward": 0.5, "mask_sample": False, "length": 8},
    ]
    async with client_of() as client:
        found = await post(client, "/aggregate_metrics", {"verify_responses": replies})
        empty = await post(client, "/aggregate_metrics", {"verify_responses": []})
        assert (await client.get("/reverify_mode")).json() == "stateless"
    assert found["key_metrics"] == {"mean/reward": 0.75, "mean/mask_sample": pytest.approx(1 / 3), "mean/length": 6}
    assert found["agent_metrics"]["std/length"] == pytest.approx(8**0.5)
    tasks = [(one["_ng_task_index"], one["num_rollouts"], one["mean/reward"]) for one in found["group_level_metrics"]]
    assert tasks == [(0, 2, 1.0), (1, 1, 0.5)]
    assert empty == {"group_level_metrics": [], "agent_metrics": {}, "key_metrics": {}}


async def test_a_task_index_of_nemo_gym_may_be_null_and_must_be_a_number() -> None:
    replies = [{"_ng_task_index": index, "reward": 1.0} for index in (1, None)]
    async with client_of() as client:
        found = await post(client, "/aggregate_metrics", {"verify_responses": replies})
        assert [one["_ng_task_index"] for one in found["group_level_metrics"]] == [0, 1]
        for wrong in ("a", [1]):
            answer = await client.post("/aggregate_metrics", json={"verify_responses": [{"_ng_task_index": wrong}]})
            assert (answer.status_code, "_ng_task_index is" in answer.text) == (422, True)


async def test_functions_that_need_groups_are_served_at_score_only() -> None:
    async with client_of(scorer(ranks, "group")) as client:
        for path, body in (("/openrlhf", openrlhf("4")), ("/slime", slime()), ("/verify", nemo_gym())):
            assert "POST to one of /score" in (await post(client, path, body, 404))["error"]


async def test_a_wrong_path_or_method_lists_the_right_ones() -> None:
    async with client_of() as client:
        assert "/openrlhf" in (await post(client, "/get_reward", {}, 404))["error"]
        answer = await client.get("/score")
    assert answer.status_code == httpx.codes.METHOD_NOT_ALLOWED
    assert "no GET /score" in answer.json()["error"]
