"""The monitors of probes warn of a judge that accepts wrong answers or changes, and not of chance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reward_loop.audit.counts import ProbeCount
from reward_loop.audit.monitors import MONITORS, HealthWarning, HealthWatch, ProbeHistory, fall, wilson_lower
from reward_loop.config import HealthConfig
from tests.audit.steps import step

BASE = step(1)
PROBES = ("canaries", "agreement", "labelled")
OFF = {monitor.name: None for monitor in MONITORS if monitor.name not in PROBES}
KINDS = ("master key", "empty", "other answer", "cut off", "question")


def run(steps: list[dict[str, ProbeCount]]) -> list[HealthWarning]:
    watch = HealthWatch(HealthConfig.model_validate(OFF))
    found = []
    for number, probes in enumerate(steps, 1):
        found += watch.check(replace(BASE, step=number, responses=[], probes=probes)).warnings
    return found


def drawn(rng: np.random.Generator, asked: int, share: float) -> ProbeCount:
    return ProbeCount(asked, int(rng.binomial(asked, share)))


@pytest.mark.parametrize("seed", range(5))
def test_a_judge_that_accepts_a_master_key_is_found_in_the_first_step(seed: int) -> None:
    counts = drawn(np.random.default_rng(seed), 32, 0.6)
    found = run([{"canary/master key": counts}])
    assert [(warning.monitor, warning.subject, warning.step) for warning in found] == [("canaries", "master key", 1)]
    count = f"{counts.accepted} of 32"
    assert found[0].message.startswith(
        f"In step 1, the judge accepted {count} wrong answers, {count} in the window (kind master key; limit 10%). Read"
    )


@pytest.mark.parametrize("asked", [1, 6, 32])
def test_a_good_judge_gives_no_warning_in_1000_steps(asked: int) -> None:
    rng = np.random.default_rng(asked)
    assert run([{f"canary/{kind}": drawn(rng, asked, 0.02) for kind in KINDS} for _ in range(1000)]) == []


def test_a_few_canaries_of_each_kind_are_counted_over_steps() -> None:
    rng = np.random.default_rng(0)
    steps = [{f"canary/{kind}": drawn(rng, 2, 0.4 if kind == "empty" else 0.02) for kind in KINDS} for _ in range(16)]
    assert {warning.subject for warning in run(steps)} == {"empty"}


def test_kinds_that_are_accepted_a_little_are_found_together() -> None:
    steps = [{f"canary/{kind}": ProbeCount(4, 1, [f"{kind} {number}"]) for kind in KINDS} for number in range(8)]
    first = run(steps)[0]
    assert first.subject == "all"
    assert len(first.samples) == 5


def test_wrong_labelled_answers_are_a_kind_of_their_own() -> None:
    found = run(
        [
            {
                "canary/labelled": ProbeCount(40, 20),
                "canary/empty": ProbeCount(40, 0),
                "canary/question": ProbeCount(40, 0),
            }
        ]
    )
    assert [warning.subject for warning in found] == ["labelled"]


@pytest.mark.parametrize("kind", ["again", "order", "frame", "labelled"])
def test_a_fall_of_the_agreement_or_accuracy_is_found_once(kind: str) -> None:
    rng = np.random.default_rng(3)
    steps = [{kind: drawn(rng, 32, 0.95 if number < 40 else 0.6)} for number in range(60)]
    (warning,) = run(steps)
    assert (warning.monitor, warning.subject) == ("labelled" if kind == "labelled" else "agreement", kind)
    assert 40 < warning.step < 52
    assert "in the first steps" in warning.message


@pytest.mark.parametrize("seed", range(3))
def test_constant_agreement_gives_no_warning_in_1000_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = [
        {"again": drawn(rng, 26, 0.9)} | ({"labelled": drawn(rng, 50, 0.8)} if i % 20 == 0 else {}) for i in range(1000)
    ]
    assert run(steps) == []


def test_a_step_without_probes_changes_nothing() -> None:
    assert run([{}, {"canary/empty": ProbeCount(0, 0), "again": ProbeCount(0, 0)}]) == []


def test_the_baseline_of_labelled_answers_is_their_first_time() -> None:
    history = ProbeHistory(baseline_steps=1, window=16)
    for number, accepted in ((1, 38), (21, 30)):
        history.add(number, ProbeCount(40, accepted))
    assert (history.first.accepted, history.recent.accepted) == (38, 30)


def test_the_lower_bound_of_a_share() -> None:
    # Of a judge whose true share is the bound, 19 of 32 are four standard errors above it.
    bound = wilson_lower(ProbeCount(32, 19))
    assert (19 / 32 - bound) / np.sqrt(bound * (1 - bound) / 32) == pytest.approx(4)
    assert wilson_lower(ProbeCount(4, 4)) == 0


def test_a_fall_needs_enough_probes_and_more_than_chance() -> None:
    assert fall(ProbeCount(31, 31), ProbeCount(400, 200)) is None
    assert fall(ProbeCount(40, 36), ProbeCount(40, 32)) == (pytest.approx(0.1), 0.0)
    assert fall(ProbeCount(400, 360), ProbeCount(400, 200)) == (pytest.approx(0.4), pytest.approx(0.4))


def false_accepts(steps: list[dict[str, Any]]) -> list[HealthWarning]:
    off = {monitor.name: None for monitor in MONITORS if monitor.name != "false_accepts"}
    watch = HealthWatch(HealthConfig.model_validate(off))
    found = []
    for number, changes in enumerate(steps, 1):
        found += watch.check(replace(BASE, step=number, responses=[], **changes)).warnings
    return found


def checked(rng: np.random.Generator, share: float, prefix: str = "") -> dict[str, Any]:
    """A step whose spot checks are a fifth of 512 samples, half of them wrong; a share of these is accepted."""
    values = np.where(rng.random(512) < share, 1.0, 0.0)
    values[(rng.random(512) > 0.2) | (rng.random(512) < 0.5)] = np.nan
    components = {f"{prefix}false_accept": values, f"{prefix}chance": np.full(512, 0.2)}
    return {"components": components, "uids": [f"s{i}" for i in range(512)]}


@pytest.mark.parametrize("prefix", ["", "helpful/"])
def test_spot_checks_find_a_cheap_judge_that_accepts_what_the_strong_one_rejects(prefix: str) -> None:
    step = checked(np.random.default_rng(0), 0.5, prefix)
    (warning,) = false_accepts([step])
    assert (warning.monitor, warning.subject) == ("false_accepts", f"spot check {prefix.rstrip('/')}".rstrip())
    values = step["components"][f"{prefix}false_accept"]
    count = f"{int(np.nansum(values))} of {int(np.isfinite(values).sum())} wrong answers"
    assert (
        f"the judge accepts answers that a second judge, which is asked at random, rejects: {count}" in warning.message
    )
    assert warning.samples == [f"s{i}" for i in np.flatnonzero(values == 1)[: len(warning.samples)]]
    assert warning.samples


def test_a_good_cheap_judge_gives_no_warning_of_false_accepts_in_1000_steps() -> None:
    rng = np.random.default_rng(1)
    assert false_accepts([checked(rng, 0.05) for _ in range(1000)]) == []


def test_answers_that_the_reference_judge_rejects_are_counted_in_the_same_way_and_not_as_canaries() -> None:
    probes = {"canary/reference": ProbeCount(40, 20, ["a"]), "canary/empty": ProbeCount(10, 0)}
    (warning,) = false_accepts([{"probes": probes}])
    assert (warning.subject, warning.samples) == ("reference judge", ["a"])
    assert run([probes]) == []
