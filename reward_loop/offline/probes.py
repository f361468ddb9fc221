"""The counts of the probes of a judge in a records folder, by kind."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reward_loop._util.intervals import Z95, kappa, paired_interval, wilson

CANARY, LABELLED, REFERENCE, ABLATION = "canary", "labelled", "reference", "ablation"
"""The probes whose value is not a share of scores that agree."""

_METRICS = {CANARY: "accepted", LABELLED: "accuracy", REFERENCE: "gap", ABLATION: "effect"}


def measured(kind: str, probes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of probes of a kind as values of JSON: one, of labelled answers also kappa and drift.

    Args:
        kind: probe and variant, such as ``canary/empty``; a component of the reference judge is ``reference/NAME``.
        probes: each with ``score``, the first score (of an ablation, that with the feature; of a labelled answer, its
            label), and its ``probe_score``. ``positive``: whether a canary was accepted, the label is equal to the
            verdict, or the scores agree; ``None`` without a verdict. Labelled answers may have a ``drift``.

    Returns:
        ``metric``: the name of the value below ``reward_loop/audit/``. ``value``: the share of positive verdicts, the
        mean gap, kappa or the drift. ``interval``: its confidence interval of 95 %; ``None`` for kappa and drift. Both
        are ``None`` if they are unknown. ``counted``: the number of probes that the value counts. Also ``kind`` and
        ``without_score``.
    """
    name = kind.partition("/")[0]
    scores = [(one["score"], one["probe_score"]) for one in probes if one["probe_score"] is not None]
    verdicts = [(one["score"] > 0.5, one["positive"]) for one in probes if one["positive"] is not None]
    counted = len(verdicts)
    value: float | None = None
    interval = None
    if name in (REFERENCE, ABLATION):
        gaps = [score - probe_score for score, probe_score in scores]
        counted, value = len(gaps), statistics.fmean(gaps) if gaps else None
        spread = statistics.stdev(gaps) if counted > 1 else None
        if name == ABLATION and value is not None:
            span = max(map(max, scores)) - min(map(min, scores))
            interval = paired_interval(counted, value, spread or 0.0, span)
        elif spread is not None and value is not None:
            error = Z95 * spread / counted**0.5
            interval = (value - error, value + error)
    elif verdicts:
        positive = sum(right for _, right in verdicts)
        value, interval = positive / counted, wilson(positive, counted)

    def result(metric: str, counted: int, value: float | None, interval: Any = None) -> dict[str, Any]:
        about = {"kind": kind, "metric": f"{kind}/{metric}", "without_score": len(probes) - len(scores)}
        return {**about, "counted": counted, "value": value, "interval": interval}

    results = [result(_METRICS.get(name, "agreement"), counted, value, interval)]
    if kind == LABELLED and verdicts:
        labels = Counter((label, label == right) for label, right in verdicts)
        results.append(result("kappa", counted, kappa(labels)))
    if drifts := [one["drift"] for one in probes if one.get("drift") is not None]:
        results.append(result("drift", len(drifts), statistics.fmean(drifts)))
    return results


def with_drifts(probes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the probes of labelled answers by ``time``, each later one with its ``drift``.

    The drift is the absolute difference to the first score of the answer, which ``uid`` names.
    """
    first: dict[str | None, float] = {}
    found = []
    for probe in sorted(probes, key=lambda probe: probe["time"]):
        score, drift = probe["probe_score"], None
        if score is not None:
            drift = abs(score - first[probe["uid"]]) if probe["uid"] in first else None
            first.setdefault(probe["uid"], score)
        found.append({**probe, "drift": drift})
    return found


def probe_counts(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the results (`measured`) of all kinds of probes, from the rows of the sub-folder ``audit``."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        kind = "/".join(filter(None, (row.get("probe"), row.get("variant"))))
        positive = row.get("accepted")
        if kind == LABELLED and positive is not None:
            positive = positive == (row["score"] > 0.5)
        probe = {"time": row.get("time") or 0.0, "uid": row.get("uid"), "positive": positive}
        found[kind].append(probe | {"score": row["score"], "probe_score": row.get("probe_score")})
        for name, (score, reference) in (row.get("components") or {}).items():
            found[f"{kind}/{name}"].append(probe | {"score": score, "probe_score": reference, "positive": None})
    if LABELLED in found:
        found[LABELLED] = with_drifts(found[LABELLED])
    return [result for kind in sorted(found) for result in measured(kind, found[kind])]
