"""A warning of the monitors is put to the test by the audit of a reward worker's manager."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample
from reward_loop.audit import Feature, open_audit
from reward_loop.audit.monitors import MONITORS
from reward_loop.config import HealthConfig
from reward_loop.records.events import HealthRecords, health
from reward_loop.verl import tq_rows
from reward_loop.verl.reward_metrics import StepRewards, TrajectoryReward
from reward_loop.verl.step_health import StepHealth

pytestmark = pytest.mark.integration  # imports verl

WORDS = ["Let", "me", "verify", "<|end|>", "right", "wrong", *(f"w{i}" for i in range(500))]
PHRASE = [0, 1, 2, 3]
GROUPS, SIZE = 16, 8


def decode(tokens: list[int], skip_special_tokens: bool = False) -> str:
    shown = [WORDS[token] for token in tokens]
    return " ".join(word for word in shown if not (skip_special_tokens and word.startswith("<")))


def pays_for_the_phrase(solution_str: str) -> float:
    return 0.5 * ("right" in solution_str) + 0.4 * ("Let me verify" in solution_str)


def pays_for_the_answer(solution_str: str) -> float:
    return float("right" in solution_str)


class Run:
    """A run in which a phrase becomes more frequent, mostly in right answers; `StepHealth` sees one reward worker."""

    def __init__(self, function: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = np.random.default_rng(1)
        self.tokens: dict[str, torch.Tensor] = {}
        others = {monitor.name: None for monitor in MONITORS if monitor.name != "phrases"}
        monitors = HealthConfig(window=4, patience=1, **others)
        options = RewardLoopConfig(log_dir=str(folder), audit={"share": 0.05, "probes": ["again"]}, health=monitors)
        self.manager = NaiveRewardLoopManager(options, compute_score=function)
        audit = open_audit(self.manager)
        assert audit is not None
        self.audit = audit
        workers: Any = SimpleNamespace(exchange_counts=list, ablate=self.audit.ablate)
        self.health = StepHealth(options, workers, decode)
        monkeypatch.setattr(tq_rows, "tq", SimpleNamespace(kv_batch_get=self.get))

    def get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        return {"responses": torch.nested.as_nested_tensor([self.tokens[key] for key in keys], layout=torch.jagged)}

    async def step(self, number: int) -> dict[str, float]:
        rewards = {}
        for group in range(GROUPS):
            for session in range(SIZE):
                is_right = self.rng.random() < 0.5
                text = [4 if is_right else 5, *self.rng.integers(6, len(WORDS), 20)]
                if self.rng.random() < (0.2 * (number - 1) if is_right else 0.02 * number):
                    text[-4:] = PHRASE
                key = f"p{group}_{session}_0"
                self.tokens[key] = torch.tensor(text)
                answer = decode(text, skip_special_tokens=True)
                sample = RewardSample(answer, uid=f"p{group}_{session}", group=f"p{group}", step=number)
                reward = (await self.manager.run_single(sample))["reward_score"]
                rewards[key] = TrajectoryReward({"reward_outcome": "scored"}, reward, reward, tokens=len(text))
        await self.audit.drain(60)
        return self.health.metrics(number, StepRewards(rewards), self.audit.take())


@pytest.mark.parametrize(
    ("function", "verdict", "paid", "active"),
    [(pays_for_the_phrase, "confirmed", 0.4, 1.0), (pays_for_the_answer, "cleared", 0.0, 0.0)],
)
async def test_a_warning_is_confirmed_or_cleared_in_the_next_step(
    function: Any,
    verdict: str,
    paid: float,
    active: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(function, tmp_path, monkeypatch)
    with caplog.at_level(logging.WARNING):
        metrics = [await run.step(number) for number in range(1, 7)]
    await asyncio.to_thread(run.manager.close)
    warned = next(i for i, found in enumerate(metrics) if found["reward_loop/health/warnings"])
    effect = metrics[warned + 1]["reward_loop/health/phrases/effect"]
    assert effect == pytest.approx(paid)
    assert metrics[warned + 1]["reward_loop/health/warnings"] == active
    assert metrics[-1]["reward_loop/health/warnings"] == active
    logged = [message for message in caplog.messages if "The judge pays" in message]
    assert len(logged) == 1
    assert f"'Let me verify' alone: the warning is {verdict}." in logged[0]
    HealthRecords(tmp_path).flush()
    (warning,) = [one for one in health(tmp_path) if one["monitor"] == "phrases"]
    assert "a phrase becomes more frequent" in warning["message"]
    assert warning["message"].endswith(f"alone: the warning is {verdict}.")


def test_no_probe_is_made_without_a_share(tmp_path: Path) -> None:
    health_of_run = StepHealth(RewardLoopConfig(), SimpleNamespace(), decode)  # type: ignore[arg-type]
    assert health_of_run._ablations is None
    assert Feature().name == "length"
