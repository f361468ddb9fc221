"""Probes of the judge: shares by kind and step, and the probes that show its largest errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from reward_loop.records.probes import CANARY, LABELLED, REFERENCE, measured
from reward_loop.records.reader import RecordsReader
from reward_loop.view.filters import BadRequestError
from reward_loop.view.index import Index

__all__ = ["AUDIT_PARAMETERS", "audit"]

AUDIT_PARAMETERS = ("kind",)

SHOWN = 20
"""The number of probes that are shown with their texts."""

MIN_PROBES = 32
"""The smallest number of probes of a baseline, as in `reward_loop.health`."""

# For the reference judge, the value is the mean gap; for the other kinds, it is a share.
_VALUES = """
count(positive) AS counted, count(*) FILTER (positive) AS positive, count(probe_score) AS scored,
    count(*) FILTER (probe_score IS NULL) AS without_score, avg(score - probe_score) AS gap,
    stddev_samp(score - probe_score) AS spread
"""
_KINDS = f"SELECT kind, {_VALUES} FROM probes GROUP BY kind ORDER BY kind"
_BY_STEP = f"SELECT kind, step, {_VALUES} FROM probes WHERE step IS NOT NULL GROUP BY ALL ORDER BY kind, step"

_ERRORS = {
    CANARY: ("positive", "probe_score DESC"),
    LABELLED: ("NOT positive", "abs(probe_score - score) DESC"),
    REFERENCE: ("probe_score IS NOT NULL", "score - probe_score DESC"),
    "": ("NOT positive", "abs(probe_score - score) DESC"),
}
"""The probes of a kind that show errors of the judge, and their order; the last entry is for all other kinds."""

_WORST = f"""
SELECT chunk, time, uid, step, function, score, probe_score FROM probes
WHERE kind = ? AND {{where}} ORDER BY {{order}}, time DESC LIMIT {SHOWN}
"""
# A uid may occur again, in another epoch: the sample that was scored at almost the same time counts.
_SAMPLES = """
SELECT uid, time, id, text_file, text_offset, text_bytes FROM samples WHERE uid IN (SELECT unnest(?))
"""


def audit(
    index: Index, reader: RecordsReader, query: Mapping[str, str], start: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the counts of the probes by kind and step, and the worst probes of a kind with their texts.

    Args:
        index: the index.
        reader: reads the texts of samples.
        query: the parameters of the request: ``kind``; by default that with the largest share of errors.
        start: the configuration of the trainer's last start, if it is recorded.

    Returns:
        ``rows``: of each kind the result, also by step, and the ``limit`` of its health monitor.

    Raises:
        BadRequestError: there are no probes of the kind.
    """
    kinds = [_measured(row) for row in index.rows(_KINDS)]
    steps: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in index.rows(_BY_STEP):
        steps[row["kind"]].append({"step": row["step"], **_measured(row)})
    names = [row["kind"] for row in kinds]
    kind = query.get("kind") or max(kinds, key=_errors, default={"kind": None})["kind"]
    if kind is not None and kind not in names:
        raise BadRequestError(f"There are no probes of the kind {kind!r}. Kinds: {', '.join(names)}")
    return {
        "rows": [
            {**row, "by_step": steps[row["kind"]], "limit": start and _limit(row["kind"], steps[row["kind"]], start)}
            for row in kinds
        ],
        "kind": kind,
        "worst": [] if kind is None else _worst(index, reader, kind),
    }


def _limit(kind: str, steps: Sequence[Mapping[str, Any]], start: Mapping[str, Any]) -> float | None:
    """Return the value beyond which the health monitor of a kind warns.

    For shares that may fall, it is that of the first steps with probes since the start, less the option.
    """
    family = kind.partition("/")[0]
    monitor = {CANARY: "canaries", LABELLED: "labelled", REFERENCE: None}.get(family, "agreement")
    options = start["options"]
    allowed = options.get(f"reward_loop.health.{monitor}")
    if family == CANARY or not isinstance(allowed, float | int):
        return allowed if isinstance(allowed, float | int) else None
    least = 1 if family == LABELLED else options.get("reward_loop.health.baseline_steps", 1)
    counted = positive = 0.0
    for number, row in enumerate(row for row in steps if row["step"] >= start["step"] and row["counted"]):
        if number >= least and counted >= MIN_PROBES:
            break
        counted += row["counted"]
        positive += row["counted"] * row["value"]
    return positive / counted - allowed if counted >= MIN_PROBES else None


def _measured(row: Mapping[str, Any]) -> dict[str, Any]:
    gaps = (row["scored"], row["gap"], row["spread"])
    return measured(row["kind"], row["counted"], row["positive"], row["without_score"], gaps)


def _errors(row: Mapping[str, Any]) -> float:
    """Return the share of errors of a kind; 0 for the reference judge, whose gap is not a share."""
    if row["value"] is None or row["kind"] == REFERENCE:
        return -1.0 if row["value"] is None else 0.0
    return float(row["value"] if row["kind"].startswith(CANARY) else 1 - row["value"])


def _worst(index: Index, reader: RecordsReader, kind: str) -> list[dict[str, Any]]:
    where, order = _ERRORS.get(kind.partition("/")[0], _ERRORS[""])
    found = index.rows(_WORST.format(where=where, order=order), [kind])
    samples: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for sample in index.rows(_SAMPLES, [[row["uid"] for row in found]]):
        samples[sample["uid"]].append(sample)
    for row in found:
        line = index.line(row.pop("chunk"), time=row["time"], uid=row["uid"]) or {}
        row |= {"answer": line.get("answer"), "exchanges": line.get("exchanges") or []}
        row["id"] = row["prompt"] = None
        if known := samples[row["uid"]]:
            sample = min(known, key=lambda sample: abs(sample["time"] - row["time"]))
            row |= {"id": sample["id"], "prompt": (reader.text(sample) or {}).get("prompt")}
    return found
