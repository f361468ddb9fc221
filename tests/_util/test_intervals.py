from __future__ import annotations

import random
import statistics

import pytest

from reward_loop._util.intervals import WeightedShare, paired_interval, wilson


@pytest.mark.parametrize(
    ("part", "total", "errors", "low", "high"),
    [(12, 20, 1.96, 0.387, 0.781), (19, 32, 4.0, 0.277, 0.848), (0, 10, 1.96, 0.0, 0.278), (10, 10, 1.96, 0.722, 1.0)],
)
def test_wilsons_interval_of_a_share(part: int, total: int, errors: float, low: float, high: float) -> None:
    assert wilson(part, total, errors) == pytest.approx((low, high), abs=0.001)


@pytest.mark.parametrize("count", [16, 64])
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (0.5, 0.5, 0.0),  # a judge of 0 and 1 that is not consistent
        (0.3, 0.6, 0.3),
        (0.02, 0.02, 0.0),  # few answers have another score the second time
        (0.02, 0.05, 0.03),
        (0.0, 0.95, 0.95),
        (None, None, 0.0),  # scores with noise
        (None, 0.31, 0.31),
    ],
)
def test_the_interval_of_paired_scores_has_the_true_difference_in_95_percent_of_simulations(
    count: int, first: float | None, second: float | None, expected: float
) -> None:
    rng = random.Random(f"{count} {first} {second}")

    def pair() -> tuple[float, float]:
        if first is None:
            quality = rng.uniform(-1, 1)
            return quality + rng.gauss(0, 0.2), quality + (second or 0.0) + rng.gauss(0, 0.2)
        return float(rng.random() < first), float(rng.random() < (second or 0.0))

    covered = 0
    for _ in range(1000):
        pairs = [pair() for _ in range(count)]
        differences = [after - before for before, after in pairs]
        scores = [score for both in pairs for score in both]
        span = max(scores) - min(scores) or 1.0
        low, high = paired_interval(count, statistics.fmean(differences), statistics.stdev(differences), span)
        covered += low <= expected <= high
    assert covered > 930


def test_equal_differences_have_an_interval_with_a_width() -> None:
    low, high = paired_interval(64, 0.0, 0.0, 1.0)
    assert low == -high
    assert 0.02 < high < 0.05
    low, high = paired_interval(64, 1.0, 0.0, 1.0)
    assert 0.9 < low < 1.0


def test_a_share_of_a_random_selection_counts_each_one_by_its_chance() -> None:
    equal = WeightedShare()
    for positive in [True] * 12 + [False] * 8:
        equal.add(positive, 0.2)
    assert (equal.count, equal.positive) == (20, 12)
    assert equal.to_dict()["interval"] == pytest.approx(wilson(12, 20))
    rng, shares = random.Random(0), []
    for _ in range(300):  # the frequent half is selected always and positive; the other with a chance of 0.2, and not
        found = WeightedShare()
        for positive, chance in [(True, 1.0), (False, 0.2)] * 50:
            if rng.random() < chance:
                found.add(positive, chance)
        assert 0 < found.count < 50
        shares.append(found.to_dict()["value"])
    assert statistics.fmean(shares) == pytest.approx(0.5, abs=0.02)
    assert WeightedShare().to_dict() == {"count": 0, "value": None, "interval": None}
