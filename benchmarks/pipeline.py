"""Measures the gain and the cost of hiding the judging: the agent, its peers, and verl's own trainer, in one run.

    python -m benchmarks.pipeline [--quick] [--verl] [--full] [--faults]

- Simulated engines: a step of the recipe of verl#2854, scaled down, with the reward agent and with a stand-in that
  schedules like the recipe's agent, compared with the floor max(G + T, R).
- Cost: CPU time and memory per sample, with 20,000 samples in flight in one process.
- verl (``--verl``): verl's trainer on a CPU, with judging that takes about as long as generation and training, as
  shipped and in the mode ``reward_pipeline``. Both trainings exist at the same time and alternate, so that other load
  slows both down. The first step of a turn is not counted: its judging ran during the other's turn.
- Faults (``--faults``): whether a run of verl that loses workers, judges, its trainer or a node trains on every sample
  exactly once. The node needs root and iproute2.

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import cost, engines

IN_FLIGHT = 20_000
BUSY = 0.5
"""Load average per processor above which a warning is printed: the figures are then not reliable."""
FEWER = 4
"""Divisor of the recipe's batch size. CPU time cannot be scaled like sleeps; a smaller batch makes it negligible."""


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
            ("at most 3 %", ours.over_floor <= 0.03),
        )
        report.add("  scheduled as in verl#2854", f"{peer.over_floor:.1%}")
        suffix = "" if more == 1 else "_much_concurrency"
        report.figures[f"over_floor{suffix}"] = round(ours.over_floor, 4)
        report.figures[f"peer_over_floor{suffix}"] = round(peer.over_floor, 4)


def sample_cost(report: Report, quick: bool, verl: bool) -> None:
    """Measure CPU time and memory per sample, for functions that do nothing."""
    rows = [
        ("in_flight_small", "in_flight", IN_FLIGHT // 4, "Agent, all in flight at once"),
        ("in_flight", "in_flight", IN_FLIGHT, "Agent, all in flight at once"),
        ("in_flight_tuned", "in_flight_tuned", IN_FLIGHT, "  with the garbage collector of the library's processes"),
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
        "cpu_us_growth_uncollected": growth("cpu_us", "uncollected"),
        "kb_growth": growth("kb"),
    }
    alone = [key for key in ("in_flight_tuned", "async", "sync", "like_verl", "rows", "verl") if key in results]
    report.figures |= {f"cpu_us_{key}": round(results[key]["cpu_us"], 1) for key in alone}


class VerlRuns:
    """Runs verl's trainer, as shipped and in our modes, in one folder and with the same judge."""

    def __init__(self, report: Report, folder: Path) -> None:
        from benchmarks import training

        folder.mkdir(parents=True, exist_ok=True)
        training.prepare(folder)
        self._training = training
        self._report = report
        self._folder = folder
        self._scale = folder / "scale"

    def compare(self, rounds: int) -> None:
        """Compare both overlaps with verl's mode ``sync``, as shipped and with a short polling interval.

        The two trainings alternate, so that other load on the machine slows both down equally.

        Args:
            rounds: number of turns of each training.
        """
        training, report = self._training, self._report
        calibration = training.Calibration(self._scale)
        both: list[dict[str, float]] = []
        verl: list[dict[str, float]] = []
        judging: list[float] = []
        steps = 2 * training.FIRST + training.SETTLING + 2 * rounds * (1 + training.BLOCK)
        task = report.task("verl's trainer, as shipped and ours, in turn", steps)
        made = {"both": 0, "verl": 0}

        def show(run: str, rows: list[dict[str, float]]) -> None:
            made[run] = len(rows)
            report.progress.update(task, completed=sum(made.values()))
            if run == "both":
                calibration.look(rows)

        look_at_ours, look_at_verl = functools.partial(show, "both"), functools.partial(show, "verl")
        with (
            self._in_turn("both") as ours,
            self._in_turn("verl", POLL_INTERVALS=",".join(training.INTERVALS)) as theirs,
        ):
            for run in (ours, theirs):
                run.begin(training.FIRST)
            theirs.finish(look_at_verl)
            ours.finish(look_at_ours)
            ours.begin(training.SETTLING)
            ours.finish(look_at_ours)
            for number in range(rounds):
                both += ours.turn(training.BLOCK, look_at_ours)
                # verl notices the last reward at its next poll, up to 2 s later: the delay depends on chance. Judging
                # is made longer or shorter by evenly spread amounts, so that the mean delay is measured.
                longer = training.POLL_S * ((number + 0.5) / rounds - 0.5)
                judging.append(calibration.hold(training.BLOCK, longer))
                verl += theirs.turn(training.BLOCK, look_at_verl)
                calibration.hold(training.BLOCK)
            ours.end()  # both trainings end at the same time
            theirs.end()
        report.progress.remove_task(task)
        self._compared(training.Steps(both), verl, statistics.fmean(judging))

    def _compared(self, both: Any, verl: list[dict[str, float]], judging: float) -> None:
        training, report = self._training, self._report
        working = both.without_judging
        report.add(
            "verl: judging of a step at full concurrency, R",
            f"{judging:.2f} s, {judging / working:.2f} of G + T",
            ("about G + T", abs(judging / working - 1) <= 0.1),
        )
        self._add(training.MODES["both"].name, both)
        shipped, short = (
            training.Steps([row for row in verl if row["training/global_step"] % 2 == odd]) for odd in (1, 0)
        )
        for name, steps in zip(training.INTERVALS.values(), (shipped, short), strict=True):
            self._add(name, steps)

        # Over a few steps, a growing backlog of judging can stay unnoticed. A step therefore counts at least R seconds.
        lasting = max(both.seconds, judging)
        reduction, fair = 1 - lasting / shipped.seconds, 1 - lasting / short.seconds
        waiting = both.waiting_share + (lasting - both.seconds) / lasting
        over_floor = lasting / max(working, judging) - 1
        report.add(
            "Both overlaps, off verl's step as shipped", f"{reduction:.1%}", ("at least 45 %", reduction >= 0.45)
        )
        report.add("  off the short interval's", f"{fair:.1%}", ("at least 35 %", fair >= 0.35))
        report.add("  share of a step spent waiting for rewards", f"{waiting:.1%}", ("under 3 %", waiting < 0.03))
        report.add("  over the floor max(G + T, R)", f"{over_floor:.1%}")
        report.figures |= {
            "verl_step_reduction": round(reduction, 4),
            "verl_step_reduction_fair": round(fair, 4),
            "verl_waiting_share": round(waiting, 4),
            "verl_over_floor": round(over_floor, 4),
            "verl_judging_share": round(judging / working, 3),
            "verl_steps": {"verl": len(shipped.rows), "verl_fair": len(short.rows), "both": len(both.rows)},
            "verl_step_s": {
                "verl": round(shipped.seconds, 3),
                "verl_fair": round(short.seconds, 3),
                "both": round(both.seconds, 3),
            },
            "verl_phases_s": {
                name: {"generation": round(steps.generation, 3), "training": round(steps.working, 3)}
                for name, steps in (("verl", shipped), ("both", both))
            },
            "verl_judging_s": round(judging, 3),
        }

    def overlaps_alone(self, steps: int) -> None:
        """Measure each overlap separately, with the judge latency that `compare` set."""
        for key in ("mini_batch", "off_policy"):
            name, first = self._training.MODES[key].name, self._training.FIRST
            task = self._report.task(name, first + steps)
            with self._in_turn(key) as run:
                run.begin(first + steps)
                rows = run.finish(lambda rows, task=task: self._report.progress.update(task, completed=len(rows)))
            self._report.progress.remove_task(task)
            alone = self._training.Steps(rows[first:])
            self._add(name, alone)
            self._report.figures["verl_step_s"][key] = round(alone.seconds, 3)

    def learning(self, steps: int, seeds: int) -> None:
        """Compare the rewards of both overlaps and of ``sync`` over a longer run, for several seeds.

        Responses are short and the judge is fast: durations change when a step runs, but hardly what it computes.
        """
        self._scale.write_text("0.1")
        curves: dict[str, list[list[float]]] = {"verl": [], "both": []}
        for seed in range(1, seeds + 1):
            chosen = (
                "data.max_response_length=32",
                *(f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}"),
            )
            for key, mode in curves.items():
                rows = self._learn(key, steps, self._folder / f"{key}-{seed}", *chosen)
                mode.append([row["critic/score/mean"] for row in rows])
                self._report.add(
                    f"{self._training.MODES[key].name}, seed {seed}: mean reward of {steps} steps, of the last 5",
                    f"{statistics.fmean(mode[-1]):.3f}, {statistics.fmean(mode[-1][-5:]):.3f}",
                )
        last = {key: [statistics.fmean(curve[-5:]) for curve in mode] for key, mode in curves.items()}
        apart = statistics.fmean(last["both"]) - statistics.fmean(last["verl"])
        noise = max(max(values) - min(values) for values in last.values())
        self._report.add(
            f"Both overlaps, reward of the last 5 of {steps} steps over that of sync",
            f"{apart:+.3f}; seeds are up to {noise:.3f} apart",
            ("not below by more than seeds differ", apart >= -noise),
        )
        self._report.figures |= {
            "verl_reward": {key: [round(value, 4) for value in values] for key, values in last.items()},
            "verl_reward_apart": round(apart, 4),
            "verl_reward_noise": round(noise, 4),
        }

    def faults(self) -> None:
        """Inject faults into a run and resume it; lose a node of another run; kill an agent outside verl."""
        from benchmarks import faults, lost_node

        report = self._report
        task = report.task("Faults in the middle of a run", faults.STEPS + lost_node.STEPS)
        run = faults.train_through(self._folder, lambda done: report.progress.update(task, completed=done))
        node = lost_node.lose_node(
            self._folder, lambda done: report.progress.update(task, completed=faults.STEPS + done)
        )
        report.progress.remove_task(task)
        agent = faults.agent_through()
        happened = run.happened | node.happened | agent.happened
        for what, how in happened.items():
            report.add(f"Faults: {what}", how)
        for what, why in node.left_out.items():
            report.add(f"Faults: {what}", f"left out: {why}")
        wrong = [*run.wrong, *node.wrong, *agent.wrong]
        report.add(
            "  every step made, every sample ended exactly once",
            "; ".join(wrong) or "yes",
            ("nothing lost, nothing twice", not wrong),
        )
        report.figures |= {"faults": sorted(happened), "faults_left_out": node.left_out, "faults_wrong": wrong}

    def _learn(self, key: str, steps: int, output: Path, *overrides: str) -> list[dict[str, float]]:
        training, progress = self._training, self._report.progress
        command = training.command(
            *(training.MODES[key], self._folder, output, steps, *overrides),
            JUDGE_SCALE=self._scale,
            POLL_INTERVALS="0.05" if key == "verl" else "",
        )
        task = self._report.task(training.MODES[key].name, steps)
        try:
            return training.run(command, output, steps, lambda rows: progress.update(task, completed=len(rows)))
        finally:
            progress.remove_task(task)

    def _in_turn(self, key: str, **environment: Any) -> Any:
        return self._training.InTurn(
            self._training.MODES[key], self._folder, self._folder / key, JUDGE_SCALE=self._scale, **environment
        )

    def _add(self, name: str, steps: Any) -> None:
        judged = "" if steps.rows[0].get("reward_pipeline/generation_s") is not None else " and judging"
        waited = steps.mean("reward_pipeline/waiting_for_rewards_s")
        self._report.add(
            name,
            f"{steps.seconds:.2f} s a step: {steps.generation:.2f} generation{judged}, {steps.working:.2f} training"
            + ("" if judged else f", {waited:.2f} waiting for rewards"),
        )


PARTS = ("engines", "cost", "verl", "overlaps", "learning", "faults")


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller shapes and fewer repetitions: under 50 s")
    parser.add_argument("--verl", action="store_true", help="also measure verl's trainer: minutes")
    parser.add_argument("--full", action="store_true", help="also each overlap alone, and learning curves: 20 minutes")
    parser.add_argument("--faults", action="store_true", help="also inject faults into a run, and resume it: minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"only these: {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="turns of each trainer (4)")
    parser.add_argument("--learning-steps", type=int, default=30, metavar="N", help="steps of a learning curve (30)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="seeds of the learning curves (2)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="folder for logs and metrics of verl's runs")
    options = parser.parse_args()
    parts = set(options.only or ("engines", "cost"))
    if not options.only:
        parts |= {"verl"} if options.verl or options.full else set()
        parts |= {"overlaps", "learning"} if options.full else set()
        parts |= {"faults"} if options.faults else set()
    if "overlaps" in parts:
        parts.add("verl")  # sets the judge latency
    with_verl = bool(parts & {"verl", "learning", "faults"})
    if options.rounds < 1 or options.learning_steps < 5 or options.seeds < 2:
        parser.error("minimum: --rounds 1, --learning-steps 5, --seeds 2")
    if with_verl and importlib.util.find_spec("verl") is None:
        parser.error("--verl: verl is not installed: pip install '.[verl]'")
    if options.keep and options.keep.exists():
        parser.error(f"--keep: {options.keep} already exists")
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(width=None if sys.stdout.isatty() else 140)
    if os.getloadavg()[0] > BUSY * (os.cpu_count() or 1):
        console.print("Other processes keep this machine busy: the figures will be too high.", style="yellow")
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    started = time.monotonic()
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            report = Report(console, progress)
            if "engines" in parts:
                sleeping_engines(report, options.quick)
            if "cost" in parts:
                sample_cost(report, options.quick, with_verl)
            if with_verl:
                _run_verl(report, parts, options)
    except KeyboardInterrupt:
        console.print("Interrupted; all processes have ended.")
        return 130
    report.figures["seconds"] = round(time.monotonic() - started, 1)
    console.print()
    console.print(report.table(), highlight=False)
    print(json.dumps(report.figures))
    return 0


def _run_verl(report: Report, parts: set[str], options: argparse.Namespace) -> None:
    from benchmarks.training import TrainingFailedError

    with tempfile.TemporaryDirectory(prefix="pipeline-") as temporary:
        runs = VerlRuns(report, options.keep.resolve() if options.keep else Path(temporary))
        try:
            if "verl" in parts:
                runs.compare(options.rounds)
            if "overlaps" in parts:
                runs.overlaps_alone(2 * options.rounds)
            if "learning" in parts:
                runs.learning(options.learning_steps, options.seeds)
            if "faults" in parts:
                runs.faults()
        except TrainingFailedError as error:
            sys.exit(str(error))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
