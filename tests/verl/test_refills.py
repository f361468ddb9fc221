"""Bounds on the replacement of groups; `test_order.py` has their messages, and the bound on filtered groups."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from reward_loop.errors import RewardLoopError
from reward_loop.verl.refills import FailureStreak, RefillLimit


def refill_limit(max_refills: int | None, **filter_groups: object) -> RefillLimit:
    config = OmegaConf.create({"algorithm": {"filter_groups": filter_groups}, "data": {"train_batch_size": 8}})
    return RefillLimit(config, max_refills, step=1)


def exhausted(limit: RefillLimit, *, failed: int, filtered: int, kept: int) -> bool:
    try:
        limit.check(failed=failed, filtered=filtered, kept=kept, failure="")
    except RewardLoopError:
        return True
    return False


def test_replacements_that_fail_again_and_again_are_too_many() -> None:
    limit = refill_limit(2)
    assert not exhausted(limit, failed=3, filtered=0, kept=5)  # what was kept is new
    assert [exhausted(limit, failed=3, filtered=0, kept=5) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("success", [{"failed": 2, "filtered": 0, "kept": 6}, {"failed": 2, "filtered": 1, "kept": 5}])
def test_one_replacement_that_does_not_fail_counts_as_a_success(success: dict[str, int]) -> None:
    limit = refill_limit(2)
    for _ in range(5):
        assert not exhausted(limit, failed=3, filtered=0, kept=5)
        assert not exhausted(limit, failed=3, filtered=0, kept=5)
        assert not exhausted(limit, **success)
        exhausted(limit, failed=0, filtered=0, kept=0)  # the next step


def test_filtered_groups_are_too_many_only_if_the_step_needs_more_groups() -> None:
    limit = refill_limit(None, metric="acc", max_num_gen_batches=2)
    assert not exhausted(limit, failed=0, filtered=20, kept=8)
    assert exhausted(limit, failed=0, filtered=1, kept=7)


def test_without_a_bound_groups_are_replaced_for_ever() -> None:
    limit = refill_limit(None)
    assert not any(exhausted(limit, failed=1, filtered=0, kept=0) for _ in range(1000))


def test_groups_that_fail_one_after_the_other_are_too_many() -> None:
    streak = FailureStreak(4)
    assert not streak.exhausted(3, ())
    assert not streak.exhausted(1, ())
    assert streak.exhausted(1, ())
    assert streak.in_a_row == 5


def test_a_group_that_ends_well_begins_the_count_again() -> None:
    streak = FailureStreak(4)
    assert not streak.exhausted(3, ())
    assert not streak.exhausted(3, {"a"})
    # It is still there, and says nothing of those that failed after it.
    assert streak.exhausted(2, {"a"})
    assert not streak.exhausted(4, {"b"})
    assert not FailureStreak(None).exhausted(10**9, ())
