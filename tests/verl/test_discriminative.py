"""The reward of a discriminative model without a function: against transformers' own logits, and verl's own text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.tiny_models import CHATML, IM_END
from reward_loop.config import RewardModelConfig
from reward_loop.serving import serve_reward_model
from reward_loop.testing import FakeJudge, Logits, Stall, Status
from reward_loop.types import RewardSample
from reward_loop.verl.workers.managers import score_by_model
from reward_loop.verl.workers.reward_worker import RewardWorker
from tests.verl.configs import resolved
from tests.verl.rollouts import rollout

pytestmark = pytest.mark.integration

PROMPT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
TEXT = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"


@pytest.fixture(scope="module")
def overrides(tiny_generative_model: Path, tiny_discriminative_model: Path) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={tiny_generative_model}",
        "reward_model.enable=True",
        "reward_model.rollout.name=transformers",
        f"reward_model.model.path={tiny_discriminative_model}",
    ]


async def test_the_reward_is_the_logit_that_transformers_computes(
    overrides: list[str], tiny_discriminative_model: Path
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_discriminative_model)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_discriminative_model).eval()
    with torch.no_grad():
        (expected,) = model(**tokenizer(TEXT, return_tensors="pt")).logits[0].tolist()
    with serve_reward_model(RewardModelConfig(model_path=str(tiny_discriminative_model))) as served:
        worker = RewardWorker(resolved(*overrides), served.reward_router_address)
        reward = await worker.compute_score(rollout("2" + IM_END, raw_prompt=PROMPT))
    assert reward["reward_extra_info"]["reward_outcome"] == "scored", reward
    assert reward["reward_score"] == pytest.approx(expected, abs=1e-4)


async def test_the_model_reads_what_it_would_read_in_verl(
    overrides: list[str], tiny_discriminative_model: Path
) -> None:
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

    data = rollout("2" + IM_END, raw_prompt=PROMPT)
    async with FakeJudge(logit=0.25) as judge:
        settings = resolved(*overrides)
        worker = RewardWorker(settings, judge.address)
        assert (await worker.compute_score(data))["reward_score"] == 0.25
        body = judge.requests[0].body
    manager: Any = worker._manager
    theirs = SimpleNamespace(
        input_tokenizer=manager.tokenizer, reward_model_tokenizer=manager.reward_model_tokenizer, config=settings.config
    )
    assert body["input"] == await RewardLoopWorker._preprocess_reward_inputs(theirs, data) == TEXT
    assert body["model"] == str(tiny_discriminative_model)
    assert body["use_activation"] is False


async def test_an_answer_that_an_agent_loop_has_scored_is_read_in_its_conversation(overrides: list[str]) -> None:
    async with FakeJudge(logit=0.25) as judge:
        worker = RewardWorker(resolved(*overrides), judge.address)
        reward = await worker.compute_score(RewardSample("2", prompt=PROMPT, extra_info={"guesses": 3}))
        lacking = await worker.compute_score(RewardSample("2"))
        await worker.compute_score(RewardSample("2", prompt=PROMPT[0]["content"]))
    assert reward["reward_score"] == 0.25
    as_text = "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert {request.body["input"] for request in judge.requests} == {TEXT, as_text}
    assert "the sample has no prompt" in lacking["reward_extra_info"]["reward_error"]


async def test_a_leading_bos_is_left_to_the_server(overrides: list[str]) -> None:
    async with FakeJudge() as judge:
        worker = RewardWorker(resolved(*overrides), judge.address)
        tokenizer: Any = worker._manager.reward_model_tokenizer
        tokenizer.bos_token = "<|im_start|>"
        tokenizer.chat_template = "{{ bos_token }}" + CHATML
        await worker.compute_score(rollout("2" + IM_END, raw_prompt=PROMPT))
        assert judge.requests[0].body["input"] == TEXT


async def test_the_last_of_several_logits_counts(overrides: list[str]) -> None:
    async with FakeJudge() as judge:
        judge.script(Logits((0.5, -1.0)))
        worker = RewardWorker(resolved(*overrides), judge.address)
        assert (await worker.compute_score(rollout("2", raw_prompt=PROMPT)))["reward_score"] == -1.0


async def test_the_deadline_of_the_model_applies_to_its_output(overrides: list[str]) -> None:
    async with FakeJudge() as judge:
        judge.script(Stall())
        settings = resolved(*overrides, "+reward_model.server.timeout=0.2", "reward_loop.retry.max_attempts=1")
        reward = await RewardWorker(settings, judge.address).compute_score(rollout("2", raw_prompt=PROMPT))
        assert "no answer within 0.2 s" in reward["reward_extra_info"]["reward_error"]


async def test_a_router_with_a_key_is_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_LOOP_API_KEY", "secret")
    async with FakeJudge() as judge:
        await score_by_model({"reward_model_input": TEXT}, judge.address)
        assert judge.requests[0].headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("columns", "template", "cause"),
    [
        ({}, CHATML, "raw_prompt"),
        ({"raw_prompt": PROMPT}, "{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ({"raw_prompt": PROMPT}, CHATML, "status 500"),
    ],
)
async def test_a_conversation_that_cannot_be_scored_is_a_failed_sample(
    overrides: list[str], columns: dict[str, Any], template: str, cause: str
) -> None:
    async with FakeJudge() as judge:
        judge.script(Status(500))
        worker = RewardWorker(resolved(*overrides, "reward_loop.retry.max_attempts=1"), judge.address)
        manager: Any = worker._manager
        manager.reward_model_tokenizer.chat_template = template
        info = (await worker.compute_score(rollout("2", **columns)))["reward_extra_info"]
    assert info["reward_outcome"] == "failed"
    assert cause in info["reward_error"]
