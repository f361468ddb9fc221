"""The rows and figures of a benchmark with several parts."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["Report", "run_benchmark"]


class Report:
    """Collects the rows of the table and the figures of the JSON line, and prints each row at once."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self.console = console
        self.progress = progress
        self.figures: dict[str, Any] = {}
        self.rows: list[tuple[str, str, str]] = []

    def add(self, what: str, value: str, goal: tuple[str, bool] | None = None) -> None:
        """Add and print a row. ``goal`` is a description of the goal and whether it was reached."""
        verdict = "" if goal is None else f"{goal[0]}: {'reached' if goal[1] else 'MISSED'}"
        self.rows.append((what, value, verdict))
        self.console.print(f"{what}: {value}" + (f"  ({verdict})" if verdict else ""), highlight=False, markup=False)

    def table(self) -> Table:
        table = Table("", "measured", "goal", box=None, padding=(0, 2, 0, 0), header_style="bold")
        for what, value, verdict in self.rows:
            table.add_row(escape(what), escape(value), escape(verdict))
        return table

    def task(self, description: str, total: int) -> Any:
        """Show a progress bar on a terminal, otherwise print a line."""
        if not self.console.is_terminal:
            self.console.print(f"{description} ...", highlight=False, markup=False)
        return self.progress.add_task(description, total=total)


def run_benchmark(measure: Callable[[Report], None], warning: str | None = None) -> int:
    """Measure, and print the table of the report and, as the last line, its figures as JSON.

    Returns:
        the exit status: 1 if the figure ``failed`` names a part, 130 after Ctrl-C or SIGTERM.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(width=None if sys.stdout.isatty() else 140)
    if warning:
        console.print(warning, style="yellow")
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    started = time.monotonic()
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            report = Report(console, progress)
            measure(report)
    except KeyboardInterrupt:
        console.print("Interrupted; all processes have ended.")
        return 130
    report.figures["seconds"] = round(time.monotonic() - started, 1)
    console.print()
    console.print(report.table(), highlight=False)
    print(json.dumps(report.figures))
    return 1 if report.figures.get("failed") else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
