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


def trained_scores(rollouts: list[dict[str, Any]]) -> list[float]:
    """The scores that are trained on: not of masked samples, nor of one that is left alone in its group."""
    trained = []
    for group in groups(rollouts).values():
        scored = [row["score"] for row in group if rewards.number(row["output"]) % 7 > 1]
        trained += scored if len(scored) > 1 else []
    return trained


def check_reward_metrics(metrics: dict[str, Any], rollouts: list[dict[str, Any]]) -> None:
    """The metrics of scores are those of the samples, recomputed."""
    trained = trained_scores(rollouts)
    for name in ("critic/score", "critic/rewards"):
        assert metrics[f"{name}/mean"] == pytest.approx(statistics.mean(trained), abs=1e-6)
        assert metrics[f"{name}/max"] == pytest.approx(max(trained))
        assert metrics[f"{name}/min"] == pytest.approx(min(trained))
    numbers = [rewards.number(row["output"]) for row in rollouts]
    raw = [number % 100 / 100 for number in numbers if number % 7 > 1]
    assert metrics["reward_loop/raw_score/mean"] == pytest.approx(statistics.mean(raw), abs=1e-6)
    assert metrics["reward_loop/scored"] == len(raw)
    assert metrics["reward_loop/unscored"] == sum(number % 7 == 0 for number in numbers)
    assert metrics["reward_loop/failed"] == sum(number % 7 == 1 for number in numbers)
    check_health(metrics, rollouts)


def check_health(metrics: dict[str, Any], rollouts: list[dict[str, Any]]) -> None:
    """The values of the health monitors are those of the samples, recomputed."""
    numbers = [rewards.number(row["output"]) for row in rollouts]
    scored = [[row["score"] for row in group if row["score"] is not None] for group in groups(rollouts).values()]
    equal = [len(set(scores)) == 1 for scores in scored if len(scores) > 1]
    expected = {
        "masked_share": statistics.mean(number % 7 <= 1 for number in numbers),
        "unparsable_verdicts": statistics.mean(number % 7 == 0 for number in numbers),
        "zero_variance_groups": statistics.mean(equal),
    }
    assert {name: metrics[f"reward_loop/health/{name}"] for name in expected} == pytest.approx(expected)


def expected_advantages(rollouts: list[dict[str, Any]]) -> list[float]:
    """GRPO by hand: the masked leave their group, and who is left alone has no baseline."""
    advantages = []
    for group in groups(rollouts).values():
        scored = [row["score"] for row in group if rewards.number(row["output"]) % 7 > 1]
        if len(scored) > 1:
            mean, deviation = statistics.mean(scored), statistics.stdev(scored)
            advantages += [(score - mean) / (deviation + 1e-6) for score in scored]
    return advantages
