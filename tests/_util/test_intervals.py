from __future__ import annotations

import random
import statistics

import pytest

from reward_loop._util.intervals import WeightedShare, wilson


@pytest.mark.parametrize(
    ("part", "total", "low", "high"),
    [(12, 20, 0.387, 0.781), (0, 10, 0.0, 0.278), (10, 10, 0.722, 1.0)],
)
def test_wilsons_interval_of_a_share(part: int, total: int, low: float, high: float) -> None:
    assert wilson(part, total) == pytest.approx((low, high), abs=0.001)


def test_a_share_of_a_random_selection_counts_each_one_by_its_chance() -> None:
    equal = WeightedShare()
    for positive in [True] * 12 + [False] * 8:
        equal.add(positive, 0.2)
    assert equal.to_dict() == {"count": 20, "value": pytest.approx(0.6), "interval": pytest.approx(wilson(12, 20))}
    half = WeightedShare(5.0, 25.0, 5.0)
    assert half + half == WeightedShare(10.0, 50.0, 10.0)
    rng, shares = random.Random(0), []
    for _ in range(300):  # the frequent half is selected always and positive; the other with a chance of 0.2, and not
        found = WeightedShare()
        for positive, chance in [(True, 1.0), (False, 0.2)] * 50:
            if rng.random() < chance:
                found.add(positive, chance)
        assert 0 < found.to_dict()["count"] < 100
        shares.append(found.to_dict()["value"])
    assert statistics.fmean(shares) == pytest.approx(0.5, abs=0.02)
    assert WeightedShare().to_dict() == {"count": 0, "value": None, "interval": None}
