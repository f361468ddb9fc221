"""The live numbers of a step, compared with values computed by hand; their warnings; and an honest run of the demo."""

from __future__ import annotations

import csv
import gzip
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reward_loop.config import HealthConfig
from reward_loop.health import NUMBERS, HealthWatch, StepNumbers, repeated_share

NAN = math.nan
GROUPS, SIZE = 64, 8
COUNT = GROUPS * SIZE
ONSET = 11
"""The first step with the planted problem."""


def made(rewards: Any, groups: Any = (), lengths: Any = (), **more: Any) -> StepNumbers:
    return StepNumbers(1, np.array(rewards, dtype=float), np.array(groups), np.array(lengths), **more)


def value(name: str, step: StepNumbers) -> float | None:
    return HealthWatch(HealthConfig()).check(step)[0].get(name)


def test_groups_with_equal_rewards_are_counted_without_masked_samples() -> None:
    step = made([1, 1, 0, 1, NAN, 0.5, NAN, NAN, 0, 0], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], np.ones(10))
    # Group 0 and 4 of 0, 1 and 4: groups 2 and 3 have fewer than two rewards.
    assert value("zero_variance_groups", step) == pytest.approx(2 / 3)
    assert value("masked_share", step) == 0.3


def test_equal_rewards_with_rounding_errors_are_not_equal_by_a_standard_deviation() -> None:
    assert value("zero_variance_groups", made([0.1 + 0.2] * 3, [0, 0, 0], np.ones(3))) == 1


def test_the_correlation_with_the_length_is_within_groups_and_ignores_masked_samples() -> None:
    groups, within = np.repeat(np.arange(16), 4), np.tile([0.0, 1.0, 2.0, 3.0], 16)
    # Across groups, longer responses have lower rewards; within each group, higher ones.
    lengths, rewards = 100.0 * groups + within, -5.0 * groups + within
    assert np.corrcoef(rewards, lengths)[0, 1] < -0.9
    assert value("length_correlation", made(rewards, groups, lengths)) == pytest.approx(1)
    assert value("length_correlation", made(-rewards, groups, lengths)) == pytest.approx(-1)
    masked = np.where(within == 2, NAN, rewards)
    assert value("length_correlation", made(masked, groups, lengths)) == pytest.approx(1)


def test_the_correlation_of_single_samples_is_the_plain_one() -> None:
    values = np.arange(40.0)
    assert value("length_correlation", made(values, np.arange(40), 2 * values)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("rewards", "lengths"),
    [(np.ones(64), np.arange(64.0)), (np.arange(64.0), np.ones(64)), (np.arange(8.0), np.arange(8.0))],
)
def test_no_correlation_without_variance_or_with_few_samples(rewards: np.ndarray, lengths: np.ndarray) -> None:
    assert value("length_correlation", made(rewards, np.arange(len(rewards)) // 4, lengths)) is None


def test_the_larger_share_of_missing_verdicts_counts() -> None:
    step = made(np.ones(100), np.arange(100), np.ones(100), unscored=10)
    assert value("no_verdict", step) == 0.1
    assert value("no_verdict", replace(step, calls=50, without_verdict=20)) == 0.4


def test_the_latency_is_the_95th_percentile() -> None:
    assert value("judge_p95_s", step(1, seconds=np.arange(101.0))) == pytest.approx(95)
    assert value("judge_p95_s", step(1, seconds=np.ones(2))) is None


LOOP, TEXT = np.tile([5, 9, 2], 40), np.random.default_rng(0).integers(0, 50_000, 120)


def test_the_share_of_repeated_ngrams() -> None:
    assert repeated_share(np.array([1, 2, 3, 4, 1, 2, 3, 4])) == pytest.approx(1 / 5)
    assert repeated_share(LOOP) == pytest.approx(1 - 3 / 117)
    assert repeated_share(TEXT) == 0
    assert repeated_share(np.array([1, 2, 3])) == 0
    assert repeated_share(np.array([1, 2, 3, 4, 0, 4, 3, 2, 1])) == 0  # the order of tokens counts


def test_responses_in_a_loop_are_repetitive_and_short_ones_are_left_out() -> None:
    short = np.array([4, 2])
    assert value("repetition", step(1, responses=[LOOP, TEXT, TEXT, TEXT, short])) == 0.25
    assert value("repetition", step(1, responses=[short, short])) is None


def test_a_step_without_samples_has_no_values() -> None:
    assert HealthWatch(HealthConfig()).check(made([])) == ({}, [])


def step(number: int, **changes: Any) -> StepNumbers:
    """A healthy step of 512 samples with random rewards, lengths and responses; ``changes`` replace parts."""
    rng = np.random.default_rng(number)
    healthy: dict[str, Any] = {
        "rewards": rng.random(COUNT),
        "groups": np.repeat(np.arange(GROUPS), SIZE),
        "lengths": rng.integers(50, 500, COUNT),
        "responses": [rng.integers(0, 50_000, 200) for _ in range(64)],
        "calls": COUNT,
        "seconds": rng.uniform(0.5, 1.5, COUNT),
    }
    return StepNumbers(step=number, **{**healthy, **changes})


PLANTED: dict[str, Callable[[StepNumbers], dict[str, Any]]] = {
    "zero_variance_groups": lambda step: {"rewards": np.where(step.groups % 16 == 0, step.rewards, 1.0)},
    "masked_share": lambda step: {"rewards": np.where(step.groups % 3 == 0, NAN, step.rewards)},
    "no_verdict": lambda step: {"calls": 256, "without_verdict": 40},
    "length_correlation": lambda step: {"rewards": step.rewards + step.lengths},
    "repetition": lambda step: {
        "responses": [np.tile([1, 2, 3, 4, 5, i], 40) if i % 5 == 0 else TEXT for i in range(64)]
    },
    "judge_p95_s": lambda step: {"seconds": 200 * np.ones(256)},
}
"""A problem for each number, as changes of a step."""


def demo_steps() -> Iterator[StepNumbers]:
    """All 24 steps of an honest run of `make demo`: rewards, lengths and durations of requests, from its records."""
    rows: dict[int, list[dict[str, float]]] = defaultdict(list)
    with gzip.open(Path(__file__).with_name("demo_run.csv.gz"), "rt", newline="") as file:
        for row in csv.DictReader(file):
            rows[int(row["step"])].append({name: float(text) for name, text in row.items()})
    for number, samples in rows.items():
        columns = {name: np.array([sample[name] for sample in samples]) for name in ("reward", "group", "length")}
        seconds = np.array([sample["judge_s"] for sample in samples])
        yield StepNumbers(
            number, columns["reward"], columns["group"], columns["length"], calls=len(samples), seconds=seconds
        )


def warnings_of(steps: list[StepNumbers], **options: Any) -> list[dict[str, Any]]:
    watch = HealthWatch(HealthConfig(**options))
    return [warning for numbers in steps for warning in watch.check(numbers)[1]]


def changed(steps: list[StepNumbers], name: str, sick: Any = range(ONSET, 100)) -> list[StepNumbers]:
    return [replace(one, **PLANTED[name](one)) if one.step in sick else one for one in steps]


HEALTHY = [step(number) for number in range(1, 40)]
DEMO = list(demo_steps())


def test_every_number_has_a_planted_problem_and_an_option() -> None:
    assert PLANTED.keys() == NUMBERS.keys() == HealthConfig.model_fields.keys() - {"enabled", "patience"}


def test_healthy_steps_and_an_honest_run_give_no_warning() -> None:
    assert [len(numbers.rewards) for numbers in DEMO] == 24 * [256]
    assert warnings_of(HEALTHY) == warnings_of(DEMO) == []
    # The records of the run have no responses.
    assert HealthWatch(HealthConfig()).check(DEMO[-1])[0].keys() == NUMBERS.keys() - {"repetition"}


@pytest.mark.parametrize("steps", [HEALTHY, DEMO], ids=["simulated", "demo"])
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_problem_gives_one_warning(name: str, steps: list[StepNumbers]) -> None:
    (warning,) = [one for one in warnings_of(changed(steps, name)) if one["monitor"] == name]
    assert (warning["since"], warning["step"]) == (ONSET, ONSET + 2)
    assert abs(warning["value"]) > warning["threshold"]
    assert warning["message"].startswith(f"Since step {ONSET}, ")


@pytest.mark.parametrize("name", PLANTED)
def test_a_number_that_is_off_has_no_value_and_no_warning(name: str) -> None:
    watch = HealthWatch(HealthConfig(**{name: None}))
    for numbers in changed(HEALTHY, name)[:16]:
        values, warnings = watch.check(numbers)
        assert name not in values
        assert name not in {warning["monitor"] for warning in warnings}


def test_a_limit_can_be_changed() -> None:
    assert warnings_of(changed(HEALTHY, "masked_share"), masked_share=0.5) == []
    assert warnings_of(changed(HEALTHY, "masked_share"), masked_share=0.3) != []


def test_fewer_steps_than_the_patience_give_no_warning() -> None:
    steps = changed(HEALTHY, "masked_share", {11, 12})
    assert warnings_of(steps) == []
    (warning,) = warnings_of(steps, patience=2)
    assert (warning["since"], warning["step"]) == (11, 12)
    assert warnings_of(changed(HEALTHY, "masked_share", {11}), patience=1)[0]["message"].startswith("In step 11, ")


def test_a_warning_is_given_again_only_after_it_has_ended() -> None:
    steps = changed(HEALTHY, "masked_share", {11, 12, 13, 15, 16, 17, 30, 31, 32})
    assert [(warning["since"], warning["step"]) for warning in warnings_of(steps)] == [(11, 13), (30, 32)]


def test_active_warnings_are_counted_until_they_end() -> None:
    watch, active = HealthWatch(HealthConfig()), []
    for numbers in changed(HEALTHY, "masked_share", range(3, 7))[:12]:
        watch.check(numbers)
        active.append(watch.active)
    assert active == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]


def test_metric_names_contain_no_word_by_which_verl_aggregates() -> None:
    assert not [name for name in NUMBERS for word in ("sum", "min", "max", "std", "mean") if word in name]
