"""Measures the gain and the cost of hiding the judging: the agent, its peers, and verl's own trainer, in one run.

    python -m benchmarks.pipeline [--quick] [--verl] [--full] [--faults]

- Simulated engines: a step of the recipe of verl#2854, scaled down, with the reward agent and with a stand-in that
  schedules like the recipe's agent, compared with the floor max(G + T, R); and with half of the groups filtered.
- Cost: CPU time and memory per sample, with 20,000 samples in flight in one process.
- verl (``--verl``): verl's trainer on a CPU, with judging that takes about as long as generation and training, as
  shipped and in the mode ``reward_pipeline``; also with half of the groups filtered (``--only verl-filter``). Both
  trainings exist at the same time and alternate, so that other load slows both down. The first step of a turn is not
  counted: its judging ran during the other's turn.
- Faults (``--faults``): whether a run of verl that loses workers, judges, its trainer or a node trains on every sample
  exactly once. The node needs root and iproute2.

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import cost, engines
from benchmarks.report import Report, run_benchmark
from benchmarks.verl_runs import VerlRuns

IN_FLIGHT = 20_000
BUSY = 0.5
"""Load average per processor above which a warning is printed: the figures are then not reliable."""
FILTERED = 0.5
"""The share of groups that the filter removes."""
FEWER = 4
"""Divisor of the recipe's batch size. CPU time cannot be scaled like sleeps; a smaller batch makes it negligible."""


def sleeping_engines(report: Report, quick: bool) -> None:
    """Measure both overlaps on simulated engines, with our agent and the peer, for R > G + T and for R < G + T."""
    steps, faster = (4, 200.0) if quick else (10, 100.0)
    for shape, more in (("R > G + T", 1), ("R < G + T", 4)):
        load = engines.scaled_down(steps, faster, FEWER, more)
        made = {"ours": engines.Ours, "peer": lambda load: engines.LikeTheRecipe(load, faster)}
        results = {}
        for name, make in made.items():
            task = report.task(f"Simulated engines, {shape}, {name}", steps)
            with make(load) as agent:
                results[name] = engines.train(agent, load, lambda task=task: report.progress.advance(task))
            report.progress.remove_task(task)
        ours, peer = results["ours"], results["peer"]
        floor = f"{load.concurrency} calls at a time, floor {ours.floor:.3f} s"
        report.add(
            f"Simulated engines, {shape} ({floor}): ours over it",
            f"{ours.over_floor:.1%}",
            ("at most 2 %", ours.over_floor <= 0.02),
        )
        report.add("  scheduled as in verl#2854", f"{peer.over_floor:.1%}")
        suffix = "" if more == 1 else "_much_concurrency"
        report.figures[f"over_floor{suffix}"] = round(ours.over_floor, 4)
        report.figures[f"peer_over_floor{suffix}"] = round(peer.over_floor, 4)


def filtered_groups(report: Report, quick: bool) -> None:
    """Measure both overlaps on simulated engines with a filter: prompts begun ahead of it, or else after it."""
    steps, faster = (6, 200.0) if quick else (12, 100.0)
    load = engines.scaled_down(steps, faster, FEWER, 4)
    name = f"Simulated engines, {FILTERED:.0%} of the groups filtered"
    over_floor = {}
    for ahead in (2.0,) if quick else (2.0, 0.0):
        task = report.task(f"{name}, max_ahead {ahead:g}", steps)
        with engines.Ours(load) as agent:
            made = engines.train_filtered(
                agent, load, FILTERED, lambda task=task: report.progress.advance(task), ahead=ahead
            )
        report.progress.remove_task(task)
        over_floor[ahead] = made.over_floor
    begun = over_floor[2.0]
    report.add(f"{name}: ours over the floor", f"{begun:.1%}", ("at most 5 %", begun <= 0.05))
    report.figures["over_floor_filtered"] = round(begun, 4)
    if (after := over_floor.get(0.0)) is not None:
        report.add("  replaced only after they are filtered", f"{after:.1%}")
        report.figures["over_floor_filtered_without_ahead"] = round(after, 4)


def sample_cost(report: Report, quick: bool, verl: bool) -> None:
    """Measure CPU time and memory per sample, for functions that do nothing."""
    rows = [
        ("in_flight_small", "in_flight", IN_FLIGHT // 4, "Agent, all in flight at once"),
        ("in_flight", "in_flight", IN_FLIGHT, "Agent, all in flight at once"),
        ("in_flight_tuned", "in_flight_tuned", IN_FLIGHT, "  with the garbage collector of the library's processes"),
        ("async", "async", IN_FLIGHT, "Agent, async function that does nothing"),
        ("sync", "sync", IN_FLIGHT, "Agent, sync function (64 threads)"),
        ("like_verl", "like_verl", IN_FLIGHT, "Tasks and thread pool as in verl's worker"),
    ]
    if not quick:
        name = "  without Python's garbage collector"
        rows += [
            ("uncollected_small", "in_flight_uncollected", IN_FLIGHT // 4, name),
            ("uncollected", "in_flight_uncollected", IN_FLIGHT, name),
        ]
    if verl:
        rows += [
            ("rows", "ours_on_rows", 4_000, "Agent, on rows of a DataProto"),
            ("verl", "verl", 4_000, "verl's naive manager, on the same"),
        ]
    results: dict[str, dict[str, float]] = {}
    task = report.task("Cost of a sample", len(rows))
    for key, what, count, name in rows:
        result = results[key] = cost.best(what, count, 1 if quick else 5)
        kb, us = result.get("kb", 0.0), result["cpu_us"]
        goal = ("under 100 us and 8 KB", us < 100 and kb < 8) if key in ("in_flight", "in_flight_tuned") else None
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
        "kb_growth": growth("kb"),
    }
    if "uncollected" in results:
        report.figures["cpu_us_growth_uncollected"] = growth("cpu_us", "uncollected")
    alone = [key for key in ("in_flight_tuned", "async", "sync", "like_verl", "rows", "verl") if key in results]
    report.figures |= {f"cpu_us_{key}": round(results[key]["cpu_us"], 1) for key in alone}


PARTS = ("engines", "filter", "cost", "verl", "verl-filter", "overlaps", "learning", "faults")


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller shapes and fewer repetitions: under 50 s")
    parser.add_argument("--verl", action="store_true", help="also measure verl's trainer: minutes")
    parser.add_argument(
        "--full", action="store_true", help="also a filter, each overlap alone, and learning curves: 25 minutes"
    )
    parser.add_argument("--faults", action="store_true", help="also inject faults into a run, and resume it: minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"only these: {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="turns of each trainer (4)")
    parser.add_argument("--learning-steps", type=int, default=30, metavar="N", help="steps of a learning curve (30)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="seeds of the learning curves (2)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="folder for logs and metrics of verl's runs")
    options = parser.parse_args()
    parts = set(options.only or ("engines", "filter", "cost"))
    if not options.only:
        parts |= {"verl"} if options.verl or options.full else set()
        parts |= {"verl-filter", "overlaps", "learning"} if options.full else set()
        parts |= {"faults"} if options.faults else set()
    if "overlaps" in parts:
        parts.add("verl")  # sets the judge latency
    with_verl = bool(parts & {"verl", "verl-filter", "learning", "faults"})
    if options.rounds < 1 or options.learning_steps < 5 or options.seeds < 2:
        parser.error("minimum: --rounds 1, --learning-steps 5, --seeds 2")
    if with_verl and importlib.util.find_spec("verl") is None:
        parser.error("--verl: verl is not installed: pip install '.[verl]'")
    if options.keep and options.keep.exists():
        parser.error(f"--keep: {options.keep} already exists")

    def measure(report: Report) -> None:
        if "engines" in parts:
            sleeping_engines(report, options.quick)
        if "filter" in parts:
            filtered_groups(report, options.quick)
        if "cost" in parts:
            sample_cost(report, options.quick, with_verl)
        if with_verl:
            _run_verl(report, parts, options)

    is_busy = os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
    warning = "Other processes keep this machine busy: the figures will be too high."
    return run_benchmark(measure, warning if is_busy else None)


def _run_verl(report: Report, parts: set[str], options: argparse.Namespace) -> None:
    from benchmarks.training import TrainingFailedError

    with tempfile.TemporaryDirectory(prefix="pipeline-") as temporary:
        runs = VerlRuns(report, options.keep.resolve() if options.keep else Path(temporary))
        try:
            if "verl" in parts:
                runs.compare(options.rounds)
            if "verl-filter" in parts:
                runs.filtered(options.rounds, FILTERED)
            if "overlaps" in parts:
                runs.overlaps_alone(2 * options.rounds)
            if "learning" in parts:
                runs.learning(options.learning_steps, options.seeds)
            if "faults" in parts:
                runs.faults()
        except TrainingFailedError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    sys.exit(main())
