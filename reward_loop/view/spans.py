"""The spans of a training step: phases, rollouts, calls of reward functions, and requests to judges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from reward_loop._util.text import cut

__all__ = ["TRAINER", "Span", "Work", "judge_spans", "rollout_spans", "scoring_start", "work_of", "works"]

Kind = Literal["rollout", "judge", "trainer"]

TRAINER = "trainer"
"""The lane of the trainer's phases."""

_MAX_ERROR = 200

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """A named interval of time in one lane. Spans of a lane may overlap."""

    kind: Kind
    lane: str
    name: str
    start: float
    """In seconds since 1970, like `end`."""
    end: float
    id: str | None = None
    """The ID of the sample's record."""
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.end - self.start


class Work(NamedTuple):
    """The work for one sample until its reward arrived. Unknown times are ``None``."""

    uid: str
    group: str | None
    id: str | None
    start: float | None
    """When generation began."""
    generated: float | None
    scoring: float | None
    """When the reward was requested."""
    scored: float | None
    """When the reward arrived."""
    step: int | None = None
    """The step in which its prompt was submitted."""
    judge: str = ""
    """The longest exchange with a judge, or the function, and its seconds, as text."""


def rollout_spans(rollouts: Iterable[Row], ids: Mapping[str, str]) -> Iterator[Span]:
    """Yield the generation of each rollout.

    Args:
        rollouts: events of rollouts.
        ids: the ID of the record of each sample, by uid.
    """
    for event in rollouts:
        detail = {"group": event.get("group"), "step": event.get("step"), "error": _short(event.get("error"))}
        lane = "validation rollouts" if event.get("validate") else "rollouts"
        uid = str(event.get("uid"))
        yield Span("rollout", lane, uid, event["start"], event["end"], ids.get(uid), _known(detail))


def judge_spans(rows: Iterable[Row]) -> Iterator[Span]:
    """Yield the calls of reward functions, and the requests to judges.

    Args:
        rows: the rows of samples. The lane of a call is its function, that of a request its model and server.
    """
    for row in rows:
        name, began = str(row.get("uid")), scoring_start(row)
        common = {"group": row.get("group"), "step": row.get("step"), "outcome": row.get("outcome")}
        calls = row.get("calls") or [{**row, "start_s": 0.0, "error": None}]
        for call in calls:
            start = began + (call.get("start_s") or 0.0)
            end = (
                start + sum(call.get(part) or 0.0 for part in ("wait_s", "work_s")) if row.get("calls") else row["time"]
            )
            parts = {part: call.get(part) for part in ("batch_s", "queue_s", "wait_s", "work_s")}
            detail = common | parts | {"error": _short(call.get("error") or row.get("error"))}
            lane = str(call.get("function") or row.get("function"))
            yield Span("judge", lane, name, start, min(end, row["time"]), row.get("id"), _known(detail))
        for judge in row.get("judges") or ():
            start = judge.get("time")
            if start is None:
                continue
            fields = ("status", "attempt", "verdict", "score", "unscored", "prompt_tokens", "completion_tokens")
            detail = common | {part: judge.get(part) for part in fields} | {"error": _short(judge.get("error"))}
            end = start + (judge.get("seconds") or 0.0)
            yield Span("judge", f"judge {_server(judge)}", name, start, end, row.get("id"), _known(detail))


def works(rollouts: Iterable[Row], rows: Iterable[Row]) -> list[Work]:
    """Return the work for each sample of training: of rollouts, and of rows that have no event of a rollout."""
    by_uid = {row.get("uid"): row for row in rows if not row.get("validate")}
    found = []
    for event in rollouts:
        row = by_uid.pop(event.get("uid"), None)
        if not event.get("validate"):
            found.append(work_of(event, row))
    for uid, row in by_uid.items():
        begun = scoring_start(row)
        found.append(
            Work(
                str(uid),
                row.get("group"),
                row.get("id"),
                None,
                begun,
                begun,
                row["time"],
                row.get("step"),
                _longest(row),
            )
        )
    return found


def work_of(rollout: Row, row: Row | None = None) -> Work:
    """Return the work for the sample of a rollout.

    Args:
        rollout: the event of the rollout.
        row: the row of the sample, if there is one.
    """
    scoring, scored = rollout.get("scoring"), rollout.get("scored")
    if row is not None and scored is None:  # scored with the whole batch
        scoring, scored = scoring_start(row), row["time"]
    return Work(
        rollout["uid"],
        rollout.get("group"),
        None if row is None else row.get("id"),
        rollout["start"],
        rollout["end"],
        scoring,
        scored,
        rollout.get("step"),
        "" if row is None else _longest(row),
    )


def scoring_start(row: Row) -> float:
    """Return when the scoring of a sample began, in seconds since 1970."""
    return row["time"] - (row.get("total_s") or 0.0)


def _longest(row: Row) -> str:
    judges = row.get("judges") or ()
    if judges:
        longest = max(judges, key=lambda judge: judge.get("seconds") or 0.0)
        return f"judge {_server(longest)} took {longest.get('seconds') or 0.0:.1f} s"
    return f"{row.get('function')} took {row.get('work_s') or 0.0:.1f} s"


def _server(judge: Row) -> str:
    return " at ".join(str(part) for part in (judge.get("model"), judge.get("backend")) if part) or str(
        judge.get("url")
    )


def _short(error: Any) -> str | None:
    return None if error is None else cut(str(error), _MAX_ERROR)


def _known(detail: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in detail.items() if value is not None}
