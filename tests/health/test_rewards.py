"""The monitors of rewards, with values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reward_loop.health.rewards import Pool, length_correlation, masked_share, score_jump, zero_variance_groups

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
