"""Compares TRL's `GRPOTrainer` with `OverlappedGRPOTrainer`, on a CPU, with a judge that takes time.

    python -m benchmarks.trl [--quick]

A policy of a million parameters learns to write digits. First, a training without a judge's latency measures generation
and training. The latency of the judge is then chosen so that it takes as long as both, or another multiple of that
(``--judging``). Then, for each seed, both trainers run in turn, so that other load on the machine slows both down. The
first two steps of a run are not counted. Needs the extra `trl`. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from benchmarks._trl_training import Run

STEPS = 40
"""Steps of a run. After fewer steps, both trainers are still learning, so their rewards differ."""
TARGET = 0.35
"""The reduction of a step that is the goal."""
NOISE = 2.0
"""The noise of a difference between the trainers, in standard errors."""


def figures_of(plain: list[Run], overlapped: list[Run]) -> dict[str, Any]:
    """Return the figures of the JSON line; each list has a run for each seed."""
    before = statistics.fmean(run.step for run in plain)
    after = statistics.fmean(run.step for run in overlapped)
    reductions = [1 - ours.step / theirs.step for theirs, ours in zip(plain, overlapped, strict=True)]
    rewards = [[run.final_reward for run in runs] for runs in (plain, overlapped)]
    means, deviations = [statistics.fmean(values) for values in rewards], [spread(values) for values in rewards]
    noise = None if len(plain) < 2 else NOISE * math.sqrt(sum(std**2 for std in deviations if std) / len(plain))
    both = [*plain, *overlapped]
    return {
        "seeds": len(plain),
        "steps": len(plain[0].rewards),
        "step_reduction": round(1 - after / before, 4),
        "step_reduction_std": spread(reductions),
        "step_plain": round(before, 4),
        "step_overlapped": round(after, 4),
        "waiting_share": round(statistics.fmean(run.waiting_share for run in overlapped), 4),
        "waiting_share_plain": round(statistics.fmean(run.waiting_share for run in plain), 4),
        "reward_plain": round(means[0], 4),
        "reward_plain_std": deviations[0],
        "reward_overlapped": round(means[1], 4),
        "reward_overlapped_std": deviations[1],
        "reward_difference": round(means[1] - means[0], 4),
        "reward_noise": None if noise is None else round(noise, 4),
        "scored_twice": sum((run.scored - run.trained).total() for run in both),
        "lost": sum((run.trained - run.scored).total() for run in both),
        "samples": sum(run.trained.total() for run in both),
    }


def spread(values: list[float]) -> float | None:
    """Return the sample standard deviation; `None` for a single value."""
    return round(statistics.stdev(values), 4) if len(values) > 1 else None


def table(figures: dict[str, Any], judging: float) -> Table:
    """Return the figures as a table."""

    def mean(name: str, digits: str) -> str:
        std = figures[f"{name}_std"]
        return format(figures[name], digits) + ("" if std is None else f" ± {std:{digits}}")

    shown = Table("", "GRPOTrainer", "OverlappedGRPOTrainer", box=None, padding=(0, 2, 0, 0), header_style="bold")
    shown.add_row("seconds a step", f"{figures['step_plain']:.2f}", f"{figures['step_overlapped']:.2f}")
    shown.add_row("waiting for the judge", f"{figures['waiting_share_plain']:.0%}", f"{figures['waiting_share']:.0%}")
    shown.add_row("reward at the end", mean("reward_plain", ".3f"), mean("reward_overlapped", ".3f"))
    if figures["steps"] < STEPS:
        shown.add_row("", "", f"too few steps to compare rewards: {figures['steps']} of {STEPS}")
    elif figures["reward_noise"] is not None:
        differs = "within" if abs(figures["reward_difference"]) <= figures["reward_noise"] else "OUTSIDE"
        noise = f"{differs} the noise of {figures['seeds']} seeds, {figures['reward_noise']:.3f}"
        shown.add_row("difference", "", f"{figures['reward_difference']:+.3f}, {noise}")
    reached = "reached" if figures["step_reduction"] >= TARGET else "MISSED"
    goal = f"at least {TARGET:.0%}: {reached}" if judging == 1 else ""
    shown.add_row("shorter step", "", f"{mean('step_reduction', '.1%')}  {goal}")
    shown.add_row("scored twice, lost", "", f"{figures['scored_twice']}, {figures['lost']} of {figures['samples']}")
    return shown


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps: under 50 s")
    parser.add_argument(
        "--seeds", "--rounds", type=int, metavar="N", help="seeds; each trainer runs once with each (3; quick: 1)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help=f"steps of a run ({STEPS}; quick: 6)")
    parser.add_argument(
        "--judging", type=float, default=1.0, metavar="X", help="judging, as a multiple of generation and training (1)"
    )
    options = parser.parse_args()

    from benchmarks._trl_training import WARM_UP, train_both  # imports torch and TRL

    seeds = (1 if options.quick else 3) if options.seeds is None else options.seeds
    steps = (6 if options.quick else STEPS) if options.steps is None else options.steps
    if seeds < 1 or steps <= WARM_UP or options.judging <= 0:
        parser.error(f"minimum: --seeds 1, --steps {WARM_UP + 1}, --judging above 0")
    console = Console(width=None if sys.stdout.isatty() else 140)
    started = time.monotonic()
    try:
        figures = figures_of(*train_both(console, seeds, steps, options.judging))
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return 130
    figures["seconds"] = round(time.monotonic() - started, 1)
    console.print()
    console.print(table(figures, options.judging), highlight=False)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
