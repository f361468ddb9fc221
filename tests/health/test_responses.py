"""The monitors of responses, with values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from reward_loop.health.responses import identical_responses, repeated_share, repetition

RNG = np.random.default_rng(0)
LOOP, TEXT = np.tile([5, 9, 2], 40), RNG.integers(0, 50_000, 120)


def test_the_share_of_repeated_ngrams() -> None:
    assert repeated_share(np.array([1, 2, 3, 4, 1, 2, 3, 4])) == pytest.approx(1 / 5)
    assert repeated_share(LOOP) == pytest.approx(1 - 3 / 117)
    assert repeated_share(TEXT) == 0
    assert repeated_share(np.array([1, 2, 3])) == 0


def test_the_order_of_tokens_distinguishes_ngrams() -> None:
    assert repeated_share(np.array([1, 2, 3, 4, 0, 4, 3, 2, 1])) == 0


def test_responses_in_a_loop_are_repetitive() -> None:
    assert repetition([LOOP, TEXT, TEXT, TEXT]) == 0.25


def test_equal_responses_are_counted() -> None:
    assert identical_responses([TEXT, LOOP, TEXT.copy(), TEXT[:100]]) == 0.5


def test_short_responses_are_left_out() -> None:
    short = np.array([4, 2])
    assert identical_responses([short, short, TEXT]) == 0
    assert repetition([short, short]) is None
    assert identical_responses([short, short]) is None
