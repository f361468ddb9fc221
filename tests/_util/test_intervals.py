from __future__ import annotations

import pytest

from reward_loop._util.intervals import wilson


@pytest.mark.parametrize(
    ("part", "total", "low", "high"),
    [(12, 20, 0.387, 0.781), (0, 10, 0.0, 0.278), (10, 10, 0.722, 1.0)],
)
def test_wilsons_interval_of_a_share(part: int, total: int, low: float, high: float) -> None:
    assert wilson(part, total) == pytest.approx((low, high), abs=0.001)
