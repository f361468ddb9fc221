"""The command ``reward-loop trace``."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from reward_loop._util.console import console
from reward_loop._util.json import encode
from reward_loop.errors import ConfigError
from reward_loop.view.trace import trace_events

__all__ = ["trace"]


def trace(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A folder of records, such as checkpoints/.../rewards.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")],
    step: Annotated[
        str | None,
        typer.Option(metavar="N[-M]", help="Only these training steps, e.g. [cyan]3[/] or [cyan]3-5[/]."),
    ] = None,
) -> None:
    """Export the timeline of a run as a trace.

    The trace has the phases of the trainer, the rollouts, the calls of reward
    functions, the requests to judges, and the critical path of each step. Open
    it in https://ui.perfetto.dev or in chrome://tracing.
    docs/events.md describes the events.
    """
    steps = None if step is None else _steps(step)
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


def _steps(text: str) -> Collection[int]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None:
        raise ConfigError(f"--step {text}: it must be a step or a range of steps, such as 3 or 3-5")
    first = int(found[1])
    last = first if found[2] is None else int(found[2])
    if last < first:
        raise ConfigError(f"--step {text}: the last step is before the first one")
    return range(first, last + 1)
