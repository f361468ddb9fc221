"""The values that the monitors compute, compared with values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reward_loop.audit.values import (
    JudgeCalls,
    Pool,
    component_saturation,
    component_share,
    identical_responses,
    judge_latency,
    length_correlation,
    masked_share,
    repeated_share,
    repetition,
    score_jump,
    unparsable_verdicts,
    weights,
    zero_variance_groups,
)

RNG = np.random.default_rng(0)

# --- Rewards

NAN = math.nan


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=float)


def test_groups_with_equal_rewards_are_counted_without_masked_samples() -> None:
    rewards = array(1, 1, 0, 1, NAN, 0.5, NAN, NAN, 0, 0)
    groups = np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    # Group 0 and 4 of 0, 1 and 4: groups 2 and 3 have fewer than two rewards.
    assert zero_variance_groups(rewards, groups) == pytest.approx(2 / 3)


@pytest.mark.parametrize("rewards", [array(), array(NAN, NAN), array(1.0, 2.0)])
def test_without_groups_of_two_rewards_there_is_no_share(rewards: np.ndarray) -> None:
    assert zero_variance_groups(rewards, np.arange(len(rewards))) is None


def test_masked_samples_are_those_without_a_reward() -> None:
    assert masked_share(array(1, NAN, 0, NAN)) == 0.5
    assert masked_share(array()) is None


def test_the_correlation_with_the_length_is_within_groups() -> None:
    groups = np.repeat(np.arange(16), 4)
    within = np.tile([0.0, 1.0, 2.0, 3.0], 16)
    # Across groups, longer responses have lower rewards; within each group, higher ones.
    lengths, rewards = 100.0 * groups + within, -5.0 * groups + within
    assert np.corrcoef(rewards, lengths)[0, 1] < -0.9
    assert length_correlation(rewards, groups, lengths) == pytest.approx(1)
    assert length_correlation(-rewards, groups, lengths) == pytest.approx(-1)


def test_the_correlation_ignores_masked_samples() -> None:
    groups = np.repeat(np.arange(16), 4)
    lengths = np.tile([1.0, 2.0, 3.0, 4.0], 16)
    rewards = np.tile([0.1, 0.2, NAN, 0.4], 16)
    assert length_correlation(rewards, groups, lengths) == pytest.approx(1)


def test_the_correlation_of_single_samples_is_the_plain_one() -> None:
    values = np.arange(40.0)
    assert length_correlation(values, np.arange(40), 2 * values) == pytest.approx(1)


@pytest.mark.parametrize(
    ("rewards", "lengths"),
    [
        (np.ones(64), np.arange(64.0)),
        (np.arange(64.0), np.ones(64)),
        (np.arange(8.0), np.arange(8.0)),
        (array(), array()),
    ],
)
def test_no_correlation_without_variance_or_with_few_samples(rewards: np.ndarray, lengths: np.ndarray) -> None:
    assert length_correlation(rewards, np.arange(len(rewards)) // 4, lengths) is None


def test_the_jump_is_the_largest_difference_of_the_distributions() -> None:
    groups = np.arange(4)
    earlier = [Pool(array(0, 0, 1, 1), 4), Pool(array(0, 1, 1, 1), 4)]
    # 1 of 4 rewards are 0, before 3 of 8.
    found = score_jump(array(0, 1, 1, 1), groups, earlier)
    assert found is not None
    assert found[0] == pytest.approx(3 / 8 - 1 / 4)
    assert found[1] == pytest.approx(1.95 * math.sqrt((4 + 8) / (4 * 8)))
    assert score_jump(array(0, 1), np.arange(2), []) is None
    assert score_jump(array(NAN), np.arange(1), earlier) is None


# --- Components

QUALITY, FORM = RNG.random(400), (RNG.random(400) < 0.5).astype(float)


def test_weights_are_found_from_the_scores() -> None:
    found = weights(0.9 * QUALITY + 0.1 * FORM + 3.0, {"quality": QUALITY, "form": FORM, "constant": np.ones(400)})
    assert found == {"quality": pytest.approx(0.9), "form": pytest.approx(0.1)}


def test_components_of_very_different_sizes_have_weights() -> None:
    found = weights(0.5 * QUALITY + 0.5 * FORM, {"quality": QUALITY, "form": FORM, "tokens": 1e6 * RNG.random(400)})
    assert found == {"quality": pytest.approx(0.5), "form": pytest.approx(0.5), "tokens": pytest.approx(0, abs=1e-6)}


@pytest.mark.parametrize(
    "components",
    [{"quality": QUALITY}, {"quality": QUALITY, "form": FORM, "other": np.full(400, 2.0)}, {}],
    ids=["one", "a product", "none"],
)
def test_a_score_that_is_not_a_sum_of_components_has_no_weights(components: dict[str, np.ndarray]) -> None:
    assert weights(QUALITY * FORM, components) == {}


def test_the_share_of_a_component_is_its_share_of_the_variance() -> None:
    shares = component_share(0.9 * QUALITY + 0.1 * FORM, {"quality": QUALITY, "form": FORM})
    expected = np.var(0.9 * QUALITY) / (np.var(0.9 * QUALITY) + np.var(0.1 * FORM))
    assert shares["quality"] == pytest.approx(expected)
    assert sum(shares.values()) == pytest.approx(1)


def test_samples_without_a_score_do_not_count() -> None:
    missing = np.arange(400) < 40
    scores = np.where(missing, math.nan, 0.5 * QUALITY + 0.5 * FORM)
    components = {"quality": np.where(missing, math.nan, QUALITY), "form": np.where(missing, math.nan, FORM)}
    assert component_share(scores, components).keys() == {"quality", "form"}
    assert component_share(np.full(400, math.nan), components) == {}


def test_saturation_counts_samples_at_the_top_of_the_range() -> None:
    values = np.array([0.0, 0.995, 1.0, 0.98, math.nan])
    assert component_saturation({"quality": values}, {"quality": (0.0, 1.0)}) == {"quality": 0.5}
    assert component_saturation({"quality": values}, {"quality": (0.0, 2.0)}) == {"quality": 0.0}


def test_a_component_that_never_varied_is_not_saturated() -> None:
    assert component_saturation({"constant": np.ones(4)}, {"constant": (1.0, 1.0)}) == {}


# --- Judges


def test_the_larger_share_of_missing_verdicts_counts() -> None:
    assert unparsable_verdicts(100, 10, None) == 0.1
    assert unparsable_verdicts(100, 10, JudgeCalls(calls=50, without_verdict=20)) == 0.4
    assert unparsable_verdicts(100, 10, JudgeCalls()) == 0.1
    assert unparsable_verdicts(0, 0, None) is None


def test_the_latency_is_the_95th_percentile() -> None:
    assert judge_latency(JudgeCalls(calls=101, seconds=np.arange(101.0))) == pytest.approx(95)
    assert judge_latency(JudgeCalls(calls=2, seconds=np.ones(2))) is None
    assert judge_latency(None) is None


# --- Responses

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
