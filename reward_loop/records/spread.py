"""The distribution of numbers in a summary."""

from __future__ import annotations

import math
import statistics
import sys
from array import array

__all__ = ["Spread"]

_EXPONENT = 400


class Spread:
    """The distribution of numbers."""

    def __init__(self) -> None:
        self._values = array("d")

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Add a number. Numbers that are not finite, or are beyond the range of float, are ignored."""
        if -sys.float_info.max <= value <= sys.float_info.max:
            self._values.append(value)

    def to_dict(self) -> dict[str, float | int | None]:
        """Return count, mean, population standard deviation, minimum, median, 95th percentile and maximum."""
        if not self._values:
            return {"count": 0, **dict.fromkeys(("mean", "std", "min", "p50", "p95", "max"))}
        values = sorted(self._values)
        low, high = values[0], values[-1]
        # Sums and squares of larger numbers are beyond the range of float, so these are scaled by a power of two.
        exponent = max(0, math.frexp(max(-low, high))[1] - _EXPONENT)
        if exponent:
            values = [math.ldexp(value, -exponent) for value in values]
        cuts = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else values * 19
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
        return {
            "count": len(values),
            "mean": math.ldexp(mean, exponent),
            "std": math.ldexp(std, exponent),
            "min": low,
            "p50": math.ldexp(cuts[9], exponent),
            "p95": math.ldexp(cuts[18], exponent),
            "max": high,
        }
