"""The distribution of numbers in a summary."""

from __future__ import annotations

import math
import statistics
from array import array

__all__ = ["Spread"]


class Spread:
    """The distribution of numbers."""

    def __init__(self) -> None:
        self._values = array("d")

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Add a number. Numbers that are not finite are ignored."""
        if math.isfinite(value):
            self._values.append(value)

    def to_dict(self) -> dict[str, float | int | None]:
        """Return count, mean, population standard deviation, minimum, median, 95th percentile and maximum."""
        if not self._values:
            return {"count": 0, **dict.fromkeys(("mean", "std", "min", "p50", "p95", "max"))}
        values = sorted(self._values)
        cuts = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else values * 19
        mean = math.fsum(values) / len(values)
        return {
            "count": len(values),
            "mean": mean,
            "std": math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)),
            "min": values[0],
            "p50": cuts[9],
            "p95": cuts[18],
            "max": values[-1],
        }
