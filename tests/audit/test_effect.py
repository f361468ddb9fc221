"""What a judge pays for a feature alone, and what becomes of the warning."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from reward_loop.audit.ablation import EffectVerdict, effect_of
from reward_loop.audit.monitors import MONITORS, HealthWarning, HealthWatch
from reward_loop.config import HealthConfig
from tests.audit.steps import step
from tests.audit.test_monitors import length_paid
from tests.audit.test_phrases import PHRASE, steps


def pairs_of(paid: float, count: int = 64, noise: float = 0.1) -> list[tuple[float, float]]:
    rng = random.Random(1)
    scores = [rng.random() for _ in range(count)]
    return [(score, score + paid + rng.gauss(0, noise)) for score in scores]


@pytest.mark.parametrize(
    ("pairs", "sign", "verdict"),
    [
        (pairs_of(0.3), 1, EffectVerdict.CONFIRMED),
        (pairs_of(0.05, noise=0.05), 1, EffectVerdict.CONFIRMED),
        (pairs_of(0.0), 1, EffectVerdict.CLEARED),
        (pairs_of(-0.3), 1, EffectVerdict.CLEARED),
        (pairs_of(-0.3), -1, EffectVerdict.CONFIRMED),  # the reward falls with the length
        (pairs_of(0.3), -1, EffectVerdict.CLEARED),
        ([(0.5, 0.5)] * 64, 1, EffectVerdict.CLEARED),
        (pairs_of(0.3, count=8), 1, EffectVerdict.UNDECIDED),
        (pairs_of(0.0, count=20, noise=3.0), 1, EffectVerdict.UNDECIDED),  # few pairs of a judge whose scores are noise
        ([], 1, EffectVerdict.UNDECIDED),
    ],
)
def test_an_interval_away_from_0_confirms_and_one_around_0_clears(
    pairs: list[tuple[float, float]], sign: int, verdict: EffectVerdict
) -> None:
    assert effect_of(pairs, sign).verdict == verdict


def test_the_sentence_has_the_size_the_interval_and_the_feature() -> None:
    pairs = [(0.2, 0.5), (0.4, 0.8)] * 32
    assert effect_of(pairs).describe("'Let me verify'") == (
        "The judge pays +0.35 (0.31 to 0.37, 64 pairs of answers) for 'Let me verify' alone: the warning is confirmed."
    )


def only(monitor: str) -> HealthWatch:
    off = {other.name: None for other in MONITORS if other.name != monitor}
    return HealthWatch(HealthConfig.model_validate(off))


def test_a_cleared_phrase_is_not_reported_again_but_another_one_is() -> None:
    watch = only("phrases")
    warnings: list[HealthWarning] = []
    for observation in steps():
        for warning in watch.check(observation).warnings:
            warnings.append(warning)
            watch.clear(warning)
    (warning,) = warnings
    assert warning.tokens == PHRASE
    for observation in steps(seed=1):
        # Another phrase, in a run whose steps follow.
        responses = [np.where(np.isin(text, PHRASE), text + 40, text) for text in observation.responses]
        warnings += watch.check(replace(observation, step=observation.step + 28, responses=responses)).warnings
    assert [one.tokens for one in warnings] == [PHRASE, [token + 40 for token in PHRASE]]


def test_a_cleared_warning_of_length_is_not_active_and_comes_again_after_it_has_ended() -> None:
    watch = only("length_correlation")

    def check(number: int, *, paid: bool) -> tuple[int, list[HealthWarning]]:
        findings = watch.check(step(number, **length_paid(number)) if paid else step(number))
        return findings.active, findings.warnings

    found = [check(number, paid=True) for number in range(1, 5)]
    assert [active for active, _ in found] == [0, 0, 1, 1]
    (warning,) = found[2][1]
    watch.clear(warning)
    assert [check(number, paid=True) for number in range(5, 9)] == [(0, [])] * 4
    assert [check(number, paid=False) for number in range(9, 13)] == [(0, [])] * 4
    again = [check(number, paid=True) for number in range(13, 17)]
    assert [(active, len(warnings)) for active, warnings in again] == [(0, 0), (0, 0), (1, 1), (1, 0)]
