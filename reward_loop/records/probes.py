"""The counts of the probes of a judge in a records folder, by kind."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from reward_loop._util.intervals import Z95, wilson

__all__ = ["CANARY", "LABELLED", "REFERENCE", "measured", "probe_counts"]

CANARY, LABELLED, REFERENCE = "canary", "labelled", "reference"
"""The probes whose value is not a share of scores that agree."""

_METRICS = {CANARY: "accepted", LABELLED: "accuracy", REFERENCE: "gap"}


def measured(
    kind: str, verdicts: int, positive: int, without_score: int, gaps: tuple[int, float | None, float | None]
) -> dict[str, Any]:
    """Return the result of the probes of a kind as values of JSON.

    Args:
        kind: probe and variant, such as ``canary/empty``.
        verdicts: the number of probes with a verdict.
        positive: those whose canary was accepted, whose label is equal to the verdict, or whose scores agree.
        without_score: the number of probes without a score.
        gaps: the number of probes with a score, and mean and standard deviation of the first score minus theirs.

    Returns:
        ``metric``: its name below ``reward_loop/audit/``. ``value``: the share of positive verdicts; for ``reference``
        the mean gap. ``interval``: its confidence interval of 95 %. Both are ``None`` if they are unknown.
        ``counted``: the number of probes that they count. Also ``kind`` and ``without_score``.
    """
    counted, value, spread = gaps if kind == REFERENCE else (verdicts, positive / verdicts if verdicts else None, None)
    interval = None
    if value is not None and kind != REFERENCE:
        interval = wilson(positive, verdicts)
    elif value is not None and spread is not None:
        error = Z95 * spread / counted**0.5
        interval = (value - error, value + error)
    metric = f"{kind}/{_METRICS.get(kind.partition('/')[0], 'agreement')}"
    found = {"kind": kind, "metric": metric, "counted": counted, "without_score": without_score}
    return {**found, "value": value, "interval": interval}


def probe_counts(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what `measured` returns for each kind of probes, from the rows of the sub-folder ``audit``."""
    verdicts: dict[str, list[bool]] = defaultdict(list)
    gaps: dict[str, list[float]] = defaultdict(list)
    total: dict[str, int] = defaultdict(int)
    for row in rows:
        kind = "/".join(filter(None, (row.get("probe"), row.get("variant"))))
        total[kind] += 1
        if row.get("probe_score") is not None:
            gaps[kind].append(row["score"] - row["probe_score"])
        if (accepted := row.get("accepted")) is not None:
            verdicts[kind].append(accepted == (row["score"] > 0.5) if kind == LABELLED else accepted)
    return [
        measured(kind, len(verdicts[kind]), sum(verdicts[kind]), total[kind] - len(gaps[kind]), _gaps(gaps[kind]))
        for kind in sorted(total)
    ]


def _gaps(gaps: list[float]) -> tuple[int, float | None, float | None]:
    return len(gaps), statistics.fmean(gaps) if gaps else None, statistics.stdev(gaps) if len(gaps) > 1 else None
