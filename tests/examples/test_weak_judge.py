"""A reward model that does not know near misses is found by labelled answers in the first step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.arithmetic import reward
from examples.arithmetic.demo import UNSEEN
from examples.arithmetic.models import Recipe, make_models, make_problems
from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample
from reward_loop.audit import open_audit
from reward_loop.audit.monitors import HealthWatch
from tests.audit.steps import step

RECIPE = Recipe(
    hidden_size=32, layers=2, held_out=64, batch_size=64, steps=40, bound=0.0, forgetting_steps=1, unseen=UNSEEN
)


@pytest.mark.parametrize("is_weak", [True, False])
async def test_a_weak_reward_model_is_found_in_the_first_step_and_the_exact_rule_is_not(
    is_weak: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = make_models(tmp_path, RECIPE).directory / "reward_model"
    scorer = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    async def classify(address: str, text: str, model: str | None = None) -> float:
        with torch.no_grad():
            return float(scorer(**tokenizer(text, return_tensors="pt")).logits)

    async def exact(solution_str: str, ground_truth: str, **_: Any) -> float:
        return float(solution_str == ground_truth)

    monkeypatch.setattr(reward, "classify", classify)
    options = RewardLoopConfig.model_validate(
        {"audit": {"labelled": str(folder.parent / "labelled.jsonl"), "accept": 0.5}}
    )
    manager = NaiveRewardLoopManager(
        options,
        compute_score=reward.compute_score if is_weak else exact,
        reward_router_address="127.0.0.1:1",
        reward_model_tokenizer=tokenizer,
    )
    audit = open_audit(manager)
    assert audit is not None
    (problem, *_), _ = make_problems(RECIPE)
    info = {"question": problem.question, "split": "train"}
    await manager.run_single(RewardSample(problem.answer, ground_truth=problem.answer, extra_info=info, step=1))
    await audit.drain(60)
    counts = audit.take()
    warnings = HealthWatch(options.health).check(replace(step(1), probes=counts.probes)).warnings
    found = [(warning.monitor, warning.subject, warning.step) for warning in warnings]
    assert found == ([("canaries", "labelled", 1)] if is_weak else [])
    manager.close()
