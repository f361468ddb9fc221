from __future__ import annotations

import pytest

from reward_loop._util.intervals import wilson


@pytest.mark.parametrize(
    ("part", "total", "errors", "low", "high"),
    [(12, 20, 1.96, 0.387, 0.781), (19, 32, 4.0, 0.277, 0.848), (0, 10, 1.96, 0.0, 0.278), (10, 10, 1.96, 0.722, 1.0)],
)
def test_wilsons_interval_of_a_share(part: int, total: int, errors: float, low: float, high: float) -> None:
    assert wilson(part, total, errors) == pytest.approx((low, high), abs=0.001)
