"""What a run of :mod:`tests.verl.rewards` must have led to."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from typing import Any

import pytest

from tests.verl import rewards


def signature(rows: list[dict[str, Any]]) -> Counter[tuple[str, str, float]]:
    return Counter((row["output"], row["gts"], round(row["score"] or 0.0, 6)) for row in rows)


def texts(rows: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter((row["output"], row["gts"]) for row in rows)


def groups(rollouts: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rollouts of a step by prompt."""
    members: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rollouts:
        members[row["uid"].rsplit("_", 2)[0]].append(row)
    return dict(members)


def check_scores(rollouts: list[dict[str, Any]]) -> None:
    """Every score is what :class:`tests.verl.rewards.Mixed` says of the response, and of its group."""
    for group in groups(rollouts).values():
        numbers = [rewards.number(row["output"]) for row in group]
        scored = iter(rewards.halve_all_but_the_best([n % 100 / 100 for n in numbers if n % 7 > 1]))
        expected = [next(scored) if n % 7 > 1 else 0.0 for n in numbers]
        assert [row["score"] for row in group] == pytest.approx(expected)


def expected_advantages(rollouts: list[dict[str, Any]]) -> list[float]:
    """GRPO by hand: the masked leave their group, and who is left alone has no baseline."""
    advantages = []
    for group in groups(rollouts).values():
        scored = [row["score"] for row in group if rewards.number(row["output"]) % 7 > 1]
        if len(scored) > 1:
            mean, deviation = statistics.mean(scored), statistics.stdev(scored)
            advantages += [(score - mean) / (deviation + 1e-6) for score in scored]
    return advantages
