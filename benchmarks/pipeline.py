"""What hiding the judging brings, and what it costs: the agent, its peers, and verl's own trainer, in one run.

    python benchmarks/pipeline.py [--quick] [--verl [--full]]

*Engines that sleep*: the step of the recipe of verl#2854, scaled down, with the reward agent and with a stand-in that
schedules as the recipe's agent does, beside the floor max(G + T, R). *Cost*: CPU time and memory a sample, with 20,000
in flight in one process. *verl* (``--verl``): verl's trainer on a CPU, with judging that takes about as long as
generation and training, as shipped and in the mode reward_pipeline. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks import cost, engines  # noqa: E402

IN_FLIGHT = 20_000
BUSY = 0.5
"""A load a processor from which on figures are not to be trusted."""
FEWER = 4
"""By which the batch is smaller than the recipe's, so that its CPU time, which cannot be scaled, does not count."""


class Report:
    """The rows of the table and the figures of the last line, as they come."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self.console = console
        self.progress = progress
        self.figures: dict[str, Any] = {}
        self.rows: list[tuple[str, str, str]] = []

    def add(self, what: str, value: str, goal: tuple[str, bool] | None = None) -> None:
        """Add a row, and show it: with a goal, and whether it was reached."""
        verdict = "" if goal is None else f"{goal[0]}: {'reached' if goal[1] else 'MISSED'}"
        self.rows.append((what, value, verdict))
        self.console.print(f"{what}: {value}" + (f"  ({verdict})" if verdict else ""), highlight=False, markup=False)

    def table(self) -> Table:
        table = Table("", "measured", "goal", box=None, padding=(0, 2, 0, 0), header_style="bold")
        for what, value, verdict in self.rows:
            table.add_row(escape(what), escape(value), escape(verdict))
        return table

    def task(self, description: str, total: int) -> Any:
        """A bar while it lasts, where there is a terminal; otherwise a line."""
        if not self.console.is_terminal:
            self.console.print(f"{description} ...", highlight=False, markup=False)
        return self.progress.add_task(description, total=total)


def sleeping_engines(report: Report, quick: bool) -> None:
    """Both overlaps on engines that sleep, ours and the peer, where judging is longer than the rest, and where not."""
    steps, faster = (4, 200.0) if quick else (10, 100.0)
    for shape, more in (("R > G + T", 1), ("R < G + T", 4)):
        load = engines.scaled_down(steps, faster, FEWER, more)
        made = {"ours": engines.Ours, "peer": lambda load: engines.LikeTheRecipe(load, faster)}
        results = {}
        for name, make in made.items():
            task = report.task(f"Engines that sleep, {shape}, {name}", steps)
            with make(load) as agent:
                results[name] = engines.train(agent, load, lambda task=task: report.progress.advance(task))
            report.progress.remove_task(task)
        ours, peer = results["ours"], results["peer"]
        floor = f"{load.concurrency} calls at a time, floor {ours.floor:.3f} s"
        report.add(
            f"Sleeping engines, {shape} ({floor}): ours over it",
            f"{ours.over_floor:.1%}",
            ("at most 3 %", ours.over_floor <= 0.03),
        )
        report.add("  scheduled as in verl#2854", f"{peer.over_floor:.1%}")
        suffix = "" if more == 1 else "_much_concurrency"
        report.figures[f"over_floor{suffix}"] = round(ours.over_floor, 4)
        report.figures[f"peer_over_floor{suffix}"] = round(peer.over_floor, 4)


def sample_cost(report: Report, quick: bool, verl: bool) -> None:
    """CPU time and memory a sample, for functions that do nothing."""
    rows = [
        ("in_flight_small", "in_flight", IN_FLIGHT // 4, "Agent, all in flight at once"),
        ("in_flight", "in_flight", IN_FLIGHT, "Agent, all in flight at once"),
        ("uncollected_small", "in_flight_uncollected", IN_FLIGHT // 4, "  without Python's garbage collector"),
        ("uncollected", "in_flight_uncollected", IN_FLIGHT, "  without Python's garbage collector"),
        ("async", "async", IN_FLIGHT, "Agent, async function that does nothing"),
        ("sync", "sync", IN_FLIGHT, "Agent, sync function (64 threads)"),
        ("like_verl", "like_verl", IN_FLIGHT, "Tasks and thread pool as in verl's worker"),
    ]
    if verl:
        rows += [
            ("rows", "ours_on_rows", 4_000, "Agent, on rows of a DataProto"),
            ("verl", "verl", 4_000, "verl's naive manager, on the same"),
        ]
    results: dict[str, dict[str, float]] = {}
    task = report.task("Cost of a sample", len(rows))
    for key, what, count, name in rows:
        result = results[key] = cost.best(what, count, 5 if not quick else 2 if key == "in_flight" else 1)
        kb, us = result.get("kb", 0.0), result["cpu_us"]
        goal = ("under 100 us and 8 KB", us < 100 and kb < 8) if key == "in_flight" else None
        report.add(f"{name}, {count:,} samples", f"{us:.1f} us of CPU" + (f", {kb:.2f} KB" if kb else ""), goal)
        report.progress.advance(task)
    report.progress.remove_task(task)

    def growth(figure: str, kind: str = "in_flight") -> float:
        return round(results[kind][figure] / results[f"{kind}_small"][figure], 2)

    report.figures |= {
        "cpu_us_per_sample": round(results["in_flight"]["cpu_us"], 1),
        "kb_per_sample": round(results["in_flight"]["kb"], 2),
        "in_flight": IN_FLIGHT,
        "cpu_us_growth": growth("cpu_us"),
        "cpu_us_growth_uncollected": growth("cpu_us", "uncollected"),
        "kb_growth": growth("kb"),
    }
    alone = [key for key in ("async", "sync", "like_verl", "rows", "verl") if key in results]
    report.figures |= {f"cpu_us_{key}": round(results[key]["cpu_us"], 1) for key in alone}


def verl_runs(report: Report, steps: int, chosen: list[str], keep: Path | None) -> None:
    """verl's trainer as shipped, and ours, one run after the other."""
    from benchmarks import training

    report.add("verl: judging of a step at full concurrency, R", f"{training.JUDGING_S:.1f} s")
    results: dict[str, training.Result] = {}
    with tempfile.TemporaryDirectory(prefix="pipeline-") as temporary:
        folder = keep.resolve() if keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        training.prepare(folder)
        for key in chosen:
            mode = training.modes()[key]
            task = report.task(mode.name, steps)
            try:
                result = results[key] = training.run(
                    mode,
                    folder,
                    folder / key,
                    steps,
                    lambda done, task=task: report.progress.update(task, completed=done),
                )
            except training.TrainingFailedError as error:
                sys.exit(str(error))
            report.progress.remove_task(task)
            generation = "generation and judging" if key in ("verl", "verl_fair") else "generation"
            waited = result.median("reward_pipeline/waiting_for_rewards_s")
            report.add(
                mode.name,
                f"{result.seconds:.2f} s a step: {result.median('timing_s/gen'):.2f} {generation}, "
                f"{result.working:.2f} training, {waited:.2f} waiting for rewards; reward {result.reward:.3f}",
            )
    both, shipped, fair = (results[key] for key in ("both", "verl", "verl_fair"))
    reduction, reduction_fair = 1 - both.seconds / shipped.seconds, 1 - both.seconds / fair.seconds
    waiting = both.waiting_share
    report.add("Both overlaps, off verl's step as shipped", f"{reduction:.1%}", ("at least 45 %", reduction >= 0.45))
    report.add("  off the short interval's", f"{reduction_fair:.1%}", ("at least 35 %", reduction_fair >= 0.35))
    report.add("  share of a step spent waiting for rewards", f"{waiting:.1%}", ("under 3 %", waiting < 0.03))
    floor = max(both.median("timing_s/gen") + both.working, training.JUDGING_S)
    report.figures |= {
        "verl_step_reduction": round(reduction, 4),
        "verl_step_reduction_fair": round(reduction_fair, 4),
        "verl_waiting_share": round(waiting, 4),
        "verl_over_floor": round(both.seconds / floor - 1, 4),
        "verl_steps": steps,
        "verl_step_s": {key: round(result.seconds, 3) for key, result in results.items()},
        "verl_reward": {key: round(result.reward, 4) for key, result in results.items()},
    }


def main() -> int:
    """The command. Returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller shapes and fewer repetitions: under 50 s")
    parser.add_argument(
        "--verl", action="store_true", help="also verl's trainer, which must be installed: some minutes"
    )
    parser.add_argument("--only-verl", action="store_true", help="nothing but verl's trainer")
    parser.add_argument("--full", action="store_true", help="with --verl: each overlap alone as well, and more steps")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of a run of verl (default: 7; full: 30)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and metrics of verl's runs here")
    options = parser.parse_args()
    with_verl = options.verl or options.only_verl
    steps = options.steps or (30 if options.full else 7)
    if steps < 5:
        parser.error("--steps: at least 5, as the first two do not count")
    if with_verl and importlib.util.find_spec("verl") is None:
        parser.error("--verl: verl is not installed: pip install 'reward-loop[verl]'")
    if options.keep and options.keep.exists():
        parser.error(f"--keep: {options.keep} exists already")
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(width=None if sys.stdout.isatty() else 140)
    if os.getloadavg()[0] > BUSY * (os.cpu_count() or 1):
        console.print("This machine is busy with something else: expect figures that are too high.", style="yellow")
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    started = time.monotonic()
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            report = Report(console, progress)
            if not options.only_verl:
                sleeping_engines(report, options.quick)
                sample_cost(report, options.quick, with_verl)
            if with_verl:
                both_alone = ["mini_batch", "off_policy"] if options.full else []
                verl_runs(report, steps, ["verl", "verl_fair", *both_alone, "both"], options.keep)
    except KeyboardInterrupt:
        console.print("Interrupted; nothing is left running.")
        return 130
    report.figures["seconds"] = round(time.monotonic() - started, 1)
    console.print()
    console.print(report.table(), highlight=False)
    print(json.dumps(report.figures))
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
