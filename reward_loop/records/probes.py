"""The counts of the probes of a judge in a records folder, by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reward_loop._util.intervals import mean_interval, wilson

__all__ = ["metric_of", "probe_counts"]

CANARY, LABELLED, REFERENCE = "canary", "labelled", "reference"


@dataclass
class _Probes:
    without_score: int = 0
    verdicts: list[bool] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def metric_of(kind: str) -> str:
    """Return the name of the metric of a kind of probes below ``reward_loop/audit/``: ``canary/empty/accepted``."""
    names = {CANARY: "accepted", LABELLED: "accuracy", REFERENCE: "gap"}
    return f"{kind}/{names.get(kind.partition('/')[0], 'agreement')}"


def probe_counts(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the counts of each kind of probes, as values of JSON.

    ``value`` is the share of accepted canaries, of scores that agree or of labelled answers judged as labelled, and for
    ``reference`` the mean of score minus reference score; ``interval`` is its confidence interval of 95 %. Both are
    ``None`` if they are unknown. ``counted`` is the number of probes that they count.

    Args:
        rows: the rows of the sub-folder ``audit``.
    """
    found: dict[str, _Probes] = defaultdict(_Probes)
    for row in rows:
        probe, variant, score, accepted = (row.get(name) for name in ("probe", "variant", "probe_score", "accepted"))
        counts = found[f"{probe}/{variant}" if variant else str(probe)]
        if score is None:
            counts.without_score += 1
        elif probe == REFERENCE:
            counts.gaps.append(row["score"] - score)
        elif accepted is not None:
            counts.verdicts.append(accepted == (row["score"] > 0.5) if probe == LABELLED else accepted)
    return [{"kind": kind, "metric": metric_of(kind), **_counts(found[kind])} for kind in sorted(found)]


def _counts(probes: _Probes) -> dict[str, Any]:
    values: list[Any] = probes.gaps or probes.verdicts
    interval = None
    if values:
        interval = mean_interval(values) if probes.gaps else wilson(sum(values), len(values))
    return {
        "counted": len(values),
        "without_score": probes.without_score,
        "value": sum(values) / len(values) if values else None,
        "interval": interval,
    }
