"""Probes of the judge: shares by kind and step, and the probes that show its largest errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from reward_loop.errors import ConfigError
from reward_loop.offline.probes import ABLATION, CANARY, LABELLED, REFERENCE, measured, with_drifts
from reward_loop.records import RecordsReader
from reward_loop.view.index import Index

SHOWN = 20
"""The number of probes that are shown with their texts."""

MIN_PROBES = 32
"""The smallest number of probes of a baseline, as in `reward_loop.audit.monitors`."""

_MONITORS = {"accepted": "canaries", "accuracy": "labelled", "agreement": "agreement"}
"""The health monitor of each measure that has one."""

# This library writes no probe without a first score.
_KINDS = "SELECT DISTINCT kind FROM probes WHERE score IS NOT NULL ORDER BY kind"
_PROBES = "SELECT step, time, uid, score, probe_score, positive FROM probes WHERE score IS NOT NULL AND kind = ?"

_ERRORS = {
    CANARY: ("positive", "probe_score DESC"),
    LABELLED: ("NOT positive", "abs(probe_score - score) DESC"),
    REFERENCE: ("probe_score IS NOT NULL", "score - probe_score DESC"),
    ABLATION: ("probe_score IS NOT NULL", "score - probe_score DESC"),
    "": ("NOT positive", "abs(probe_score - score) DESC"),
}
"""The probes of a kind that show errors of the judge, and their order; the last entry is for all other kinds."""

# Labelled answers are scored again and again: only the latest error of each is shown.
_WORST = f"""
SELECT chunk, time, uid, step, function, score, probe_score, positive FROM probes WHERE kind = ? AND {{where}}
QUALIFY uid IS NULL OR row_number() OVER (PARTITION BY uid ORDER BY time DESC) = 1
ORDER BY {{order}}, time DESC LIMIT {SHOWN}
"""
# A uid may occur again, in another epoch: the sample that was scored at almost the same time counts.
_SAMPLES = """
SELECT uid, time, id, text_file, text_offset, text_bytes FROM samples WHERE uid IN (SELECT unnest(?))
"""
# Prompt and ground truth of a labelled answer are in its first row.
_FIRST = """
SELECT uid, arg_min(chunk, time) AS chunk, min(time) AS time FROM probes
WHERE kind = ? AND uid IN (SELECT unnest(?)) GROUP BY uid
"""


def audit(
    index: Index, reader: RecordsReader, query: Mapping[str, str], start: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the results of the probes by kind and step, and the worst probes of a kind with their texts.

    Of an ablation, these are the pairs with the largest effects: ``answer`` is the changed answer, ``response`` that of
    the sample, and ``positive`` says whether the changed one has the feature; ``score`` is that with the feature.

    Args:
        index: the index.
        reader: reads the texts of samples.
        query: the parameters of the request: ``kind``; by default that with the largest share of errors.
        start: the configuration of the trainer's last start, if it is recorded.

    Returns:
        ``rows``: of each kind the result, also by step, and the ``limit`` of its health monitor.

    Raises:
        ConfigError: the records contain no probes of this kind.
    """
    kinds: list[dict[str, Any]] = []
    steps: dict[str, list[dict[str, Any]]] = defaultdict(list)
    # One kind at a time: a run may have hundreds of thousands of probes.
    for name in [row["kind"] for row in index.rows(_KINDS)]:
        found = index.rows(_PROBES, [name])
        probes = with_drifts(found) if name == LABELLED else found
        kinds += measured(name, probes)
        by_step: dict[int | None, list[dict[str, Any]]] = defaultdict(list)
        for probe in probes:
            by_step[probe["step"]].append(probe)
        for step in sorted(step for step in by_step if step is not None):
            for result in measured(name, by_step[step]):
                steps[result["metric"]].append({"step": step, **result})
    names = [row["kind"] for row in kinds]
    kind = query.get("kind") or max(kinds, key=_errors, default={"kind": None})["kind"]
    if kind is not None and kind not in names:
        raise ConfigError(f"No probes of the kind {kind!r} were found. Kinds: {', '.join(dict.fromkeys(names))}")
    return {
        "rows": [
            {
                **row,
                "by_step": steps[row["metric"]],
                "limit": start and _limit(row["metric"], steps[row["metric"]], start),
            }
            for row in kinds
        ],
        "kind": kind,
        "worst": [] if kind is None else _worst(index, reader, kind),
    }


def _limit(metric: str, steps: Sequence[Mapping[str, Any]], start: Mapping[str, Any]) -> float | None:
    """Return the value beyond which the health monitor of a metric warns; ``None`` if there is no such monitor.

    For shares that may fall, it is that of the first steps with probes since the start, less the option.
    """
    monitor = _MONITORS.get(metric.rpartition("/")[2])
    options = start["options"]
    allowed = options.get(f"reward_loop.health.{monitor}")
    if not isinstance(allowed, float | int):
        return None
    if monitor == "canaries":
        return allowed
    least = 1 if monitor == "labelled" else options.get("reward_loop.health.baseline_steps", 1)
    counted = positive = 0.0
    for number, row in enumerate(row for row in steps if row["step"] >= start["step"] and row["counted"]):
        if number >= least and counted >= MIN_PROBES:
            break
        counted += row["counted"]
        positive += row["counted"] * row["value"]
    return positive / counted - allowed if counted >= MIN_PROBES else None


def _errors(row: Mapping[str, Any]) -> float:
    """Return the share of errors of a kind; 0 if the value is not a share, as the gap of the reference judge."""
    name, measure = row["kind"].partition("/")[0], row["metric"].rpartition("/")[2]
    if row["value"] is None or name in (REFERENCE, ABLATION) or measure in ("kappa", "drift"):
        return -1.0 if row["value"] is None else 0.0
    return float(row["value"] if name == CANARY else 1 - row["value"])


def _worst(index: Index, reader: RecordsReader, kind: str) -> list[dict[str, Any]]:
    where, order = _ERRORS.get(kind.partition("/")[0], _ERRORS[""])
    found = index.rows(_WORST.format(where=where, order=order), [kind])
    samples: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for sample in index.rows(_SAMPLES, [[row["uid"] for row in found]]):
        samples[sample["uid"]].append(sample)
    first = {}
    if kind == LABELLED:
        first = {row["uid"]: row for row in index.rows(_FIRST, [kind, [row["uid"] for row in found]])}
    for row in found:
        line = index.line(row.pop("chunk"), time=row["time"], uid=row["uid"]) or {}
        row |= {"answer": line.get("answer"), "exchanges": line.get("exchanges") or []}
        row["id"] = None
        texts: Mapping[str, Any] = {}
        if known := first.get(row["uid"]):
            texts = index.line(known["chunk"], time=known["time"], uid=row["uid"]) or {}
        elif found_samples := samples[row["uid"]]:
            sample = min(found_samples, key=lambda sample: abs(sample["time"] - row["time"]))
            row["id"], texts = sample["id"], reader.text(sample) or {}
        row |= {"prompt": texts.get("prompt"), "ground_truth": texts.get("ground_truth")}
        row["response"] = texts.get("response") if kind.startswith(f"{ABLATION}/") else None
    return found
