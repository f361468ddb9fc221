"""The bound on groups that fail in a row."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from reward_loop.errors import RewardLoopError
from reward_loop.verl.trainer.refills import FailureStreak


def exhausted(streak: FailureStreak, failed: int, successful: Collection[str]) -> bool:
    try:
        streak.count(failed, successful, lambda: "The last one is q_0")
    except RewardLoopError:
        return True
    return False


def test_groups_that_fail_one_after_the_other_are_too_many() -> None:
    streak = FailureStreak(4, "max_refills=2")
    assert not exhausted(streak, 3, ())
    assert not exhausted(streak, 1, ())
    message = r"5 groups failed in a row, replacements included \(max_refills=2, .* allows 4\)\. The last one is q_0"
    with pytest.raises(RewardLoopError, match=message):
        streak.count(1, (), lambda: "The last one is q_0")


def test_a_group_that_ends_well_begins_the_count_again() -> None:
    streak = FailureStreak(4, "")
    assert not exhausted(streak, 3, ())
    assert not exhausted(streak, 3, {"a"})
    # It is still there, and says nothing of those that failed after it.
    assert exhausted(streak, 2, {"a"})
    assert not exhausted(streak, 4, {"b"})
    assert not exhausted(FailureStreak(None, ""), 10**9, ())
