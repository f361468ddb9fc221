"""What a run of :mod:`tests.verl.rewards` must have led to."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from typing import Any

from tests.verl import rewards


def signature(rows: list[dict[str, Any]]) -> Counter[tuple[str, str, float]]:
    return Counter((row["output"], row["gts"], round(row["score"] or 0.0, 6)) for row in rows)


def expected_advantages(rollouts: list[dict[str, Any]]) -> list[float]:
    """GRPO by hand: the masked leave their group, and who is left alone has no baseline."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rollouts:
        groups[row["uid"].rsplit("_", 2)[0]].append(row)
    advantages = []
    for group in groups.values():
        scored = [row["score"] for row in group if rewards.number(row["output"]) % 7 > 1]
        if len(scored) > 1:
            mean, deviation = statistics.mean(scored), statistics.stdev(scored)
            advantages += [(score - mean) / (deviation + 1e-6) for score in scored]
    return advantages
