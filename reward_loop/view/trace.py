"""Exports the timeline of a run as a trace for Perfetto or Chrome.

The format is the JSON array of the Trace Event Format: ``X`` events have a start ``ts`` and a duration ``dur`` in
microseconds, ``M`` events name processes. Each lane is a process here. Slices of one thread must not overlap unless one
contains the other, so overlapping spans of a lane are placed in several threads.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from reward_loop._util.json import encode
from reward_loop._util.standard_streams import console
from reward_loop.errors import ConfigError
from reward_loop.offline import cli_options
from reward_loop.records import PHASE, ROLLOUT, STEP, RecordsReader, read_events
from reward_loop.view.critical import TRAINER, Row, Work, critical_path, works
from reward_loop.view.timeline import NEWER, OLDER, Span, judge_spans, lanes_of, near_steps, rollout_spans, step_phases

MAX_TRACE_SPANS = 1_000_000
"""The largest number of spans of a trace. Viewers of traces cannot open much larger ones."""

CRITICAL = "critical path"
"""The lane of the critical paths of all steps."""


def trace_events(folder: Path, steps: range | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of the trace of a run.

    Args:
        folder: a records folder.
        steps: the training steps; ``None`` for all, with samples that have no step.

    Raises:
        NoRecordsError: there is no such folder, or it contains no records.
        ConfigError: nothing is recorded for these steps, or there are more than `MAX_TRACE_SPANS` spans.
    """
    spans = _spans(folder, steps)
    if not spans:
        raise ConfigError(f"{folder} has no records of these steps")
    if len(spans) > MAX_TRACE_SPANS:
        raise ConfigError(
            f"{folder} has {len(spans)} spans, and a trace has at most {MAX_TRACE_SPANS}: choose some steps with --step"
        )
    begun = min(span.start for span in spans)
    for pid, (kind, lane, ordered) in enumerate(lanes_of(spans), start=1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": lane}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for span, tid in zip(ordered, _threads(ordered, nested=kind == "trainer"), strict=True):
            args = dict(span.detail) | ({} if span.id is None else {"id": span.id})
            # Both ends are rounded, not the duration: spans that do not overlap stay apart.
            start, end = round((span.start - begun) * 1e6), round((span.end - begun) * 1e6)
            times = {"ts": start, "dur": max(0, end - start)}
            yield {"ph": "X", "name": span.name, "cat": span.kind, "pid": pid, "tid": tid, **times, "args": args}


def _spans(folder: Path, steps: range | None) -> list[Span]:
    reader = RecordsReader(folder)
    # Also of the steps around them, whose samples the trainer may have waited for in a chosen one.
    wider = None if steps is None else range(steps.start - OLDER, steps.stop + NEWER)
    rows = list(reader.rows() if wider is None else reader.rows_of(wider))
    events: dict[str, list[Row]] = defaultdict(list)
    for event in read_events(folder, wider):
        events[event["kind"]].append(event)

    def chosen(found: Iterable[Row]) -> list[Row]:
        # `None in range(...)` would look at each number of the range.
        found_in = ((one, (one.get("step"), one.get("generated_step"))) for one in found)
        return [
            one for one, at in found_in if steps is None or any(isinstance(step, int) and step in steps for step in at)
        ]

    spans = [*rollout_spans(chosen(events[ROLLOUT]), rows), *judge_spans(chosen(rows))]
    by_step: dict[int, list[Row]] = defaultdict(list)
    for found in chosen(events[PHASE]):
        by_step[found["step"]].append(found)
    work_by_step: dict[int | None, list[Work]] = defaultdict(list)
    for work in works(events[ROLLOUT], rows):
        work_by_step[work.step].append(work)
    for step in sorted(by_step):
        outer = step_phases(by_step[step], step)
        for phase in (phase for top in outer for phase in top.all()):
            spans.append(Span("trainer", TRAINER, phase.name, phase.start, phase.end, detail={"step": step}))
        training = [phase for phase in outer if phase.name == STEP]
        near = [work for n in near_steps(step) for work in work_by_step[n]]
        for part in critical_path(training, near):
            spans.append(Span("trainer", CRITICAL, part.name, part.start, part.end, detail={"step": step}))
    return spans


def _threads(spans: Sequence[Span], nested: bool) -> Iterable[int]:
    """Return a thread for each span, so that the spans of a thread do not overlap.

    Args:
        spans: in the order of their starts.
        nested: whether overlapping spans contain each other; they stay in one thread.
    """
    if nested:
        return [1] * len(spans)
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    threads = []
    for span in spans:
        while busy and busy[0][0] <= span.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        thread = heapq.heappop(free) if free else len(busy) + 1
        heapq.heappush(busy, (span.end, thread))
        threads.append(thread)
    return threads


def trace(
    folder: cli_options.RecordsFolder,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")],
    step: cli_options.Steps = None,
) -> None:
    """Export the timeline of a run as a trace.

    The trace has the phases of the trainer, the rollouts, the calls of reward
    functions, the requests to judges, and the critical path of each step. Open
    it in https://ui.perfetto.dev or in chrome://tracing.
    docs/records.md describes the events.
    """
    steps = None if step is None else cli_options.step_range(step)
    count = 0
    events = trace_events(folder, steps)
    first = next(events)  # raises before the file is created
    with output.open("wb") as file:
        file.write(b"[\n" + encode(first))
        for event in events:
            count += event["ph"] == "X"
            file.write(b",\n" + encode(event))
        file.write(b"\n]\n")
    console().print(f"{count} spans in {escape(str(output))}: open it in https://ui.perfetto.dev")
