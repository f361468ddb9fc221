"""The monitor of the reference warns when the reward rises and the reference does not, and not of noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reward_loop.audit.monitors import MONITORS, HealthWarning, HealthWatch
from reward_loop.audit.reference import JUDGE
from reward_loop.audit.values import Observation
from reward_loop.config import HealthConfig
from tests.audit.steps import demo_steps

GROUPS, SIZE = 64, 4
ONLY: dict[str, Any] = {m.name: None for m in MONITORS if m.name != "reference_gap"} | {"reference": "acc"}


def run(steps: list[Observation], **options: Any) -> list[HealthWarning]:
    watch = HealthWatch(HealthConfig(**ONLY | options))
    return [warning for observation in steps for warning in watch.check(observation).warnings]


def series(reward: np.ndarray, acc: np.ndarray, seed: int = 0, difficulty: float = 0.2) -> list[Observation]:
    """Steps with these mean rewards and references, random samples, and prompts of random difficulty."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(GROUPS), SIZE)
    steps = []
    for number, (paid, right) in enumerate(zip(reward, acc, strict=True), 1):
        prompts = rng.normal(scale=difficulty, size=GROUPS)[groups]
        rewards, references = (mean + prompts + rng.normal(scale=0.3, size=len(groups)) for mean in (paid, right))
        uids = [f"{number}-{group}_{i % SIZE}" for i, group in enumerate(groups)]
        steps.append(
            Observation(
                step=number,
                rewards=10 * rewards,  # the scales of reward and reference differ
                groups=groups,
                lengths=np.full(len(groups), 4),
                scores=10 * rewards,
                components={"acc": references},
                uids=uids,
            )
        )
    return steps


def line(start: float, end: float, steps: int) -> np.ndarray:
    return np.linspace(start, end, steps)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("end", [0.4, 0.5])
def test_a_reward_that_rises_while_the_reference_falls_or_stays_gives_one_warning(end: float, seed: int) -> None:
    reward, acc = line(0.3, 0.9, 40), np.concatenate([line(0.2, 0.5, 20), line(0.5, end, 20)])
    (warning,) = run(series(reward, acc, seed))
    assert (warning.monitor, warning.subject) == ("reference_gap", "acc")
    assert 22 <= warning.step <= 40
    assert warning.value > warning.threshold >= 0.3
    assert "'acc' falls behind" in warning.message
    assert "over 16 steps" in warning.message


@pytest.mark.parametrize("seed", range(5))
def test_noise_gives_no_warning(seed: int) -> None:
    assert run(series(np.full(400, 0.5), np.full(400, 0.5), seed)) == []
    assert run(series(np.full(400, 0.5), np.full(400, 0.5), seed, difficulty=0.0)) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_run_in_which_both_rise_and_then_stay_gives_no_warning(seed: int) -> None:
    reward = np.concatenate([line(0.3, 0.9, 40), np.full(60, 0.9)])
    acc = np.concatenate([line(0.1, 0.8, 40), np.full(60, 0.8)])
    assert run(series(reward, acc, seed)) == []


def test_a_reward_that_falls_less_than_the_reference_gives_no_warning() -> None:
    assert run(series(line(0.9, 0.8, 40), line(0.9, 0.3, 40))) == []


def test_the_warning_names_samples_with_a_high_reward_and_a_low_reference() -> None:
    steps = series(line(0.3, 0.9, 20), np.full(20, 0.5))
    (warning,) = run(steps)
    step = steps[warning.step - 1]
    at = [list(step.uids).index(uid) for uid in warning.samples]
    assert len(at) == len({step.groups[i] for i in at}) == 5
    assert all(step.components["acc"][i] < step.components["acc"].mean() for i in at)
    low = step.components["acc"] < step.components["acc"].mean()
    assert step.rewards[at[0]] == step.rewards[low].max()


def test_a_demo_whose_reward_model_accepts_wrong_answers_is_found() -> None:
    hacked = []
    for step in demo_steps():
        rng = np.random.default_rng(step.step)
        share = max(0, step.step - 8) / 24  # of the answers: wrong, and judged right
        accepted = rng.random(len(step.rewards)) < share
        acc = np.where(accepted, 0.0, step.components["acc"])
        rewards = np.where(accepted, 0.99, step.rewards)
        hacked.append(replace(step, rewards=rewards, components={**step.components, "acc": acc}, uids=["u"] * 256))
    (warning,) = run(hacked)
    assert warning.step <= 24


@pytest.mark.parametrize("change", [{"reference": None}, {"reference_gap": None}, {"reference": "other"}])
def test_without_a_reference_there_is_no_value(change: dict[str, Any]) -> None:
    watch = HealthWatch(HealthConfig(**ONLY | change))
    for observation in series(line(0.3, 0.9, 20), np.full(20, 0.5)):
        assert watch.check(observation).values == {}


def test_masked_samples_and_samples_without_a_reference_do_not_count() -> None:
    steps = []
    for step in series(line(0.3, 0.9, 20), np.full(20, 0.5)):
        masked, missing = np.arange(len(step.rewards)) % 8 == 0, np.arange(len(step.rewards)) % 8 == 1
        rewards = np.where(masked, np.nan, step.rewards)
        components = {"acc": np.where(missing, np.nan, step.components["acc"])}
        steps.append(replace(step, rewards=rewards, components=components))
    (warning,) = run(steps)
    assert all(int(uid[-1]) not in (0, 1) or int(uid.split("-")[1].split("_")[0]) % 2 for uid in warning.samples)


def test_a_reference_that_never_varies_gives_no_value() -> None:
    steps = [
        replace(step, components={"acc": np.zeros(len(step.rewards))})
        for step in series(line(0.3, 0.9, 20), np.zeros(20))
    ]
    assert run(steps) == []


def with_judge(steps: list[Observation], share: float = 0.1, seed: int = 0) -> list[Observation]:
    """The same steps, whose reference is a judge that scores a share of the samples."""
    rng = np.random.default_rng(seed)
    found = []
    for step in steps:
        chosen = rng.random(len(step.rewards)) < share
        pairs = np.stack([step.rewards, step.components["acc"]], axis=1)[chosen]
        uids = [step.uids[i] for i in np.flatnonzero(chosen)]
        found.append(replace(step, components={}, reference_pairs=pairs, reference_uids=uids))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_reference_judge_is_a_reference(seed: int) -> None:
    steps = series(np.concatenate([np.full(16, 0.4), line(0.4, 1.0, 16)]), np.full(32, 0.5), seed)
    (warning,) = run(judged := with_judge(steps), reference=None)
    assert warning.subject == JUDGE
    assert 20 <= warning.step <= 32
    step = judged[warning.step - 1]
    rewards, references = step.reference_pairs.T
    gaps = (rewards - rewards.mean()) / rewards.std() - (references - references.mean()) / references.std()
    assert warning.samples == [step.reference_uids[i] for i in np.argsort(-gaps)[:5]]


@pytest.mark.parametrize("seed", range(5))
def test_a_policy_that_improves_gives_no_warning(seed: int) -> None:
    line_up = line(0.3, 0.9, 100)
    assert run(with_judge(series(line_up, line_up, seed), seed=seed), reference=None) == []


def test_a_gap_is_found_although_the_reference_rises_a_little() -> None:
    (warning,) = run(series(line(0.3, 0.9, 40), line(0.3, 0.45, 40)))
    assert warning.subject == "acc"
