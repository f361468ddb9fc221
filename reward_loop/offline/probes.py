"""The counts of the probes of a judge in a records folder, by kind."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from reward_loop._util.intervals import Z95, kappa, paired_interval, wilson

__all__ = ["ABLATION", "CANARY", "LABELLED", "REFERENCE", "measured", "probe_counts"]

CANARY, LABELLED, REFERENCE, ABLATION = "canary", "labelled", "reference", "ablation"
"""The probes whose value is not a share of scores that agree."""

_METRICS = {CANARY: "accepted", LABELLED: "accuracy", REFERENCE: "gap", ABLATION: "effect"}


def measured(kind: str, sums: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the results of the probes of a kind as values of JSON: one, of labelled answers also kappa and drift.

    Args:
        kind: probe and variant, such as ``canary/empty``; a component of the reference judge is ``reference/NAME``.
        sums: of the probes of the kind:

            - ``verdicts``: their number with a verdict; ``positive``: those whose canary was accepted, whose label is
              equal to the verdict, or whose scores agree; ``without_score``: their number without a score.
            - ``scored``, ``gap``, ``spread``, ``span``: their number with a score; mean and standard deviation of the
              first score minus theirs; the range of both scores. Of an ablation, the first score is that with the
              feature.
            - ``labelled``, ``found``: of labelled answers, the verdicts on those with the label *true*, and how many of
              these are *true*; ``drifts``, ``drift``: their number after the first time, and the mean absolute
              difference to the first score.

    Returns:
        ``metric``: the name of the value below ``reward_loop/audit/``. ``value``: the share of positive verdicts, the
        mean gap, kappa or the drift. ``interval``: its confidence interval of 95 %; ``None`` for kappa and drift. Both
        are ``None`` if they are unknown. ``counted``: the number of probes that the value counts. Also ``kind`` and
        ``without_score``.
    """
    name = kind.partition("/")[0]
    verdicts, positive = sums["verdicts"], sums["positive"]
    counted, value, interval = verdicts, None, None
    if name == ABLATION:
        counted, value = sums["scored"], sums["gap"]
        if counted:
            interval = paired_interval(counted, value, sums["spread"] or 0.0, sums["span"])
    elif name == REFERENCE:
        counted, value = sums["scored"], sums["gap"]
        if sums["spread"] is not None:
            error = Z95 * sums["spread"] / counted**0.5
            interval = (value - error, value + error)
    elif verdicts:
        value, interval = positive / verdicts, wilson(positive, verdicts)

    def result(metric: str, counted: int, value: float | None, interval: Any = None) -> dict[str, Any]:
        about = {"kind": kind, "metric": f"{kind}/{metric}", "without_score": sums["without_score"]}
        return {**about, "counted": counted, "value": value, "interval": interval}

    results = [result(_METRICS.get(name, "agreement"), counted, value, interval)]
    if kind == LABELLED and verdicts:
        found, labelled = sums["found"], sums["labelled"]
        rejected = positive - found
        labels = {(True, True): found, (True, False): labelled - found, (False, False): rejected}
        results.append(result("kappa", verdicts, kappa({**labels, (False, True): verdicts - labelled - rejected})))
    if kind == LABELLED and sums["drifts"]:
        results.append(result("drift", sums["drifts"], sums["drift"]))
    return results


class _Probe(NamedTuple):
    time: float
    uid: str | None
    score: float
    probe_score: float | None
    accepted: bool | None


def probe_counts(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the results (`measured`) of all kinds of probes, from the rows of the sub-folder ``audit``."""
    probes: dict[str, list[_Probe]] = defaultdict(list)
    for row in rows:
        kind = "/".join(filter(None, (row.get("probe"), row.get("variant"))))
        about = (row.get("time") or 0.0, row.get("uid"))
        probes[kind].append(_Probe(*about, row["score"], row.get("probe_score"), row.get("accepted")))
        for name, (score, reference) in (row.get("components") or {}).items():
            probes[f"{kind}/{name}"].append(_Probe(*about, score, reference, None))
    return [result for kind in sorted(probes) for result in measured(kind, _sums(kind, probes[kind]))]


def _sums(kind: str, probes: Sequence[_Probe]) -> dict[str, Any]:
    scored = [probe for probe in probes if probe.probe_score is not None]
    both = [score for probe in scored for score in (probe.score, probe.probe_score) if score is not None]
    gaps = [probe.score - probe.probe_score for probe in scored if probe.probe_score is not None]
    # The score of a labelled answer is its label.
    verdicts = [(probe.score > 0.5, probe.accepted) for probe in probes if probe.accepted is not None]
    drifts = _drifts(scored) if kind == LABELLED else []
    return {
        "verdicts": len(verdicts),
        "positive": sum(accepted == label if kind == LABELLED else accepted for label, accepted in verdicts),
        "without_score": len(probes) - len(scored),
        "scored": len(scored),
        "gap": statistics.fmean(gaps) if gaps else None,
        "spread": statistics.stdev(gaps) if len(gaps) > 1 else None,
        "span": max(both) - min(both) if both else None,
        "labelled": sum(label for label, _ in verdicts),
        "found": sum(label and accepted for label, accepted in verdicts),
        "drifts": len(drifts),
        "drift": statistics.fmean(drifts) if drifts else None,
    }


def _drifts(scored: Sequence[_Probe]) -> list[float]:
    """Return the absolute difference of each score to the first score of its answer, without the first ones."""
    first: dict[str | None, float] = {}
    drifts = []
    for probe in sorted(scored, key=lambda probe: probe.time):
        assert probe.probe_score is not None
        if probe.uid in first:
            drifts.append(abs(probe.probe_score - first[probe.uid]))
        first.setdefault(probe.uid, probe.probe_score)
    return drifts
