"""Each monitor warns of a planted problem, and an honest run has no warning."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reward_loop.audit.counts import ProbeCount
from reward_loop.audit.monitors import MONITORS, HealthWarning, HealthWatch
from reward_loop.audit.values import JudgeCalls, Observation
from reward_loop.config import HealthConfig
from tests.audit.steps import GROUPS, SIZE, demo_steps, step

COUNT = GROUPS * SIZE
ONSET = 11
"""The first step with the planted problem."""


def equal_rewards(number: int) -> dict[str, Any]:
    """A judge that gives all responses to a prompt the same score."""
    return {"rewards": np.repeat(np.random.default_rng(number).random(GROUPS), SIZE)}


def masked(number: int) -> dict[str, Any]:
    """A judge that fails for a third of the samples."""
    return {"rewards": np.where(np.arange(COUNT) % 3 == 0, math.nan, step(number).rewards)}


def dominated(number: int) -> dict[str, Any]:
    """The quality is the same for all responses, so only the form decides."""
    honest = step(number)
    quality = 0.5 + 0.01 * honest.components["quality"]
    form = honest.components["form"]
    return {"scores": 0.7 * quality + 0.3 * form, "components": {"quality": quality, "form": form}}


def saturated(number: int) -> dict[str, Any]:
    """The policy has found a response that the quality judge always rates highest."""
    honest = step(number)
    return {"components": {"quality": np.full(COUNT, 0.999), "form": honest.components["form"]}}


def length_paid(number: int) -> dict[str, Any]:
    """A judge that prefers long responses."""
    honest = step(number)
    return {"rewards": honest.rewards + honest.lengths / 200}


def loops(number: int) -> dict[str, Any]:
    """A fifth of the responses repeat a sentence."""
    honest = step(number).responses
    return {"responses": [np.tile([1, 2, 3, 4, 5, i], 40) if i % 5 == 0 else row for i, row in enumerate(honest)]}


def collapsed(number: int) -> dict[str, Any]:
    """Most responses are the same text."""
    honest = step(number).responses
    return {"responses": [honest[0] if i % 4 else row for i, row in enumerate(honest)]}


def unparsable(number: int) -> dict[str, Any]:
    """Responses after which the judge replies without a verdict."""
    return {"judges": JudgeCalls(calls=COUNT, without_verdict=COUNT // 8, seconds=np.ones(COUNT))}


def slow(number: int) -> dict[str, Any]:
    """An overloaded judge."""
    return {"judges": JudgeCalls(calls=COUNT, seconds=4 * np.ones(COUNT))}


def exploited(number: int) -> dict[str, Any]:
    """Half of the responses suddenly have the highest reward."""
    return {"rewards": np.where(np.arange(COUNT) % 2 == 0, 1.0, step(number).rewards)}


def fooled(number: int) -> dict[str, Any]:
    """A judge that accepts ":" in 60 % of cases."""
    return {"probes": {"canary/master key": ProbeCount(32, 19, ["u1"])}}


def deceived(number: int) -> dict[str, Any]:
    """A cheap judge that accepts half of the answers that spot checks find wrong."""
    every = np.arange(COUNT)
    false_accept = np.where(every % 8 == 0, (every % 16 == 0).astype(float), np.nan)
    return {"components": {**step(number).components, "false_accept": false_accept, "chance": np.full(COUNT, 0.2)}}


PLANTED: dict[str, Callable[[int], dict[str, Any]]] = {
    "zero_variance_groups": equal_rewards,
    "masked_share": masked,
    "component_share": dominated,
    "component_saturation": saturated,
    "length_correlation": length_paid,
    "repetition": loops,
    "identical_responses": collapsed,
    "unparsable_verdicts": unparsable,
    "judge_latency": slow,
    "canaries": fooled,
    "false_accepts": deceived,
    "score_jump": exploited,
}


def judged(step: Observation, score: np.ndarray) -> dict[str, Any]:
    """The changed fields of a step if the demo's reward model returns these scores."""
    rewards = 0.9 * score + 0.1 * step.components["format"]
    return {"scores": rewards, "rewards": rewards, "components": {**step.components, "reward_model": score}}


HACKS: dict[str, Callable[[Observation], dict[str, Any]]] = {
    "zero_variance_groups": lambda step: {"rewards": np.where(step.groups % 16 == 0, step.rewards, 1.0)},
    "masked_share": lambda step: {"rewards": np.where(step.groups % 3 == 0, math.nan, step.rewards)},
    "component_share": lambda step: judged(step, 0.5 + 0.001 * step.components["reward_model"]),
    "component_saturation": lambda step: judged(step, np.full(len(step.rewards), 0.9999)),
    "length_correlation": lambda step: {"rewards": step.rewards + step.lengths},
    "unparsable_verdicts": lambda step: {"unscored": 40},
    "judge_latency": lambda step: {"judges": JudgeCalls(calls=256, seconds=20 * np.ones(256))},
    "score_jump": lambda step: {"rewards": np.where(step.groups % 4 == 0, step.rewards, 1.0)},
}
"""Problems by monitor, as changes of a step of the demo."""


def run(steps: list[Observation], **options: Any) -> list[HealthWarning]:
    watch = HealthWatch(HealthConfig(**options))
    return [warning for observation in steps for warning in watch.check(observation).warnings]


def planted(name: str, last: int = 16) -> list[Observation]:
    return [step(number, **(PLANTED[name](number) if number >= ONSET else {})) for number in range(1, last)]


def only(name: str) -> dict[str, None]:
    """Options that turn off the other monitors: several monitors detect some planted problems."""
    return {monitor.name: None for monitor in MONITORS if monitor.name != name}


def test_every_monitor_has_a_planted_problem() -> None:
    elsewhere = {"reference_gap", "agreement", "labelled", "phrases"}  # see the tests of these modules
    assert set(PLANTED) == {monitor.name for monitor in MONITORS} - elsewhere


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_problem_gives_one_warning(name: str) -> None:
    (warning,) = run(planted(name), **only(name))
    is_event = name in ("canaries", "false_accepts", "score_jump")
    assert (warning.monitor, warning.since, warning.step) == (name, ONSET, ONSET if is_event else ONSET + 2)
    assert abs(warning.value) > warning.threshold
    assert f"step {ONSET}" in warning.message


@pytest.mark.parametrize("name", PLANTED)
def test_with_all_monitors_the_planted_problem_is_among_the_warnings(name: str) -> None:
    assert name in {warning.monitor for warning in run(planted(name))}


def test_healthy_steps_give_no_warning() -> None:
    assert run([step(number) for number in range(1, 40)]) == []


def test_an_honest_run_of_the_demo_gives_no_warning() -> None:
    steps = list(demo_steps())
    assert [len(observation.rewards) for observation in steps] == 24 * [256]
    watch = HealthWatch(HealthConfig(reference="acc"))
    found = [watch.check(observation) for observation in steps]
    assert [warning for findings in found for warning in findings.warnings] == []
    # The run has no texts and no probes.
    others = {"repetition", "identical_responses", "phrases", "canaries", "false_accepts", "agreement", "labelled"}
    assert set(found[-1].values) == {monitor.name for monitor in MONITORS} - others


@pytest.mark.parametrize("name", HACKS)
def test_a_problem_planted_into_the_demo_is_found(name: str) -> None:
    steps = list(demo_steps())
    hacked = [replace(honest, **HACKS[name](honest)) if honest.step >= ONSET else honest for honest in steps]
    found = [warning for warning in run(hacked) if warning.monitor == name]
    assert [warning.since for warning in found] == [ONSET]


@pytest.mark.parametrize("name", PLANTED)
def test_a_monitor_that_is_off_has_no_value_and_no_warning(name: str) -> None:
    watch = HealthWatch(HealthConfig(**{name: None}))
    for observation in planted(name):
        found = watch.check(observation)
        assert name not in found.values
        assert name not in {warning.monitor for warning in found.warnings}


def test_a_threshold_can_be_changed() -> None:
    assert run(planted("masked_share"), masked_share=0.5) == []
    assert run(planted("masked_share"), masked_share=0.3) != []


def test_fewer_steps_than_the_patience_give_no_warning() -> None:
    steps = [step(number, **(masked(number) if number in (11, 12) else {})) for number in range(1, 20)]
    assert run(steps) == []
    (warning,) = run(steps, patience=2)
    assert (warning.since, warning.step) == (11, 12)


def test_a_warning_is_given_again_only_after_it_has_ended() -> None:
    sick = {11, 12, 13, 15, 16, 17, 30, 31, 32}
    steps = [step(number, **(masked(number) if number in sick else {})) for number in range(1, 40)]
    assert [(warning.since, warning.step) for warning in run(steps)] == [(11, 13), (30, 32)]


def test_active_warnings_are_counted_until_they_end() -> None:
    watch = HealthWatch(HealthConfig(**only("masked_share")))
    steps = [step(number, **(masked(number) if 3 <= number <= 6 else {})) for number in range(1, 13)]
    assert [watch.check(observation).active for observation in steps] == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]


def test_a_component_that_dominates_from_the_start_is_not_reported() -> None:
    steps = [step(number, **dominated(number)) for number in range(1, 20)]
    assert run(steps, **only("component_share")) == []


def test_both_directions_of_the_correlation_are_reported() -> None:
    def short(number: int) -> Observation:
        honest = step(number)
        return step(number, rewards=honest.rewards - honest.lengths / 200)

    (warning,) = run([short(number) for number in range(1, 6)], **only("length_correlation"))
    assert warning.value < -0.6


def test_a_step_without_samples_has_no_values() -> None:
    empty = np.empty(0)
    nothing = Observation(1, rewards=empty, groups=empty, lengths=empty, scores=empty)
    assert HealthWatch(HealthConfig()).check(nothing).values == {}


def test_names_of_components_may_contain_braces() -> None:
    def renamed(number: int) -> Observation:
        made = step(number, **(dominated(number) if number >= ONSET else {}))
        quality, form = made.components["quality"], made.components["form"]
        return step(number, scores=made.scores, components={"{x}": form, "quality": quality})

    (warning,) = run([renamed(number) for number in range(1, 16)], **only("component_share"))
    assert "'{x}'" in warning.message


def test_metric_names_contain_no_word_by_which_verl_aggregates() -> None:
    for monitor in MONITORS:
        assert not [word for word in ("sum", "min", "max", "std", "mean") if word in monitor.name]
