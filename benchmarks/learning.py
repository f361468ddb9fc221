"""Compares what a policy learns one step off-policy and on-policy, on the demo's task, with several seeds.

    python -m benchmarks.learning [--quick] [--picture FILE]

Each run is that of `examples.arithmetic.demo` without the additional latency of its judge. The runs of a seed get the
same problems in the same order; they differ only in ``one_step_off_policy``. All start with the same policy. The table
has the exact match on held-out problems.

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.training import TrainingFailedError, run
from examples.arithmetic.demo import QUICK, Settings, make, training_command
from examples.arithmetic.models import Models
from examples.arithmetic.report import read_report

Curve = Mapping[int, float]
"""The share of held-out problems with an exactly right answer, by the number of steps made."""

MODES = {"on-policy": False, "one step off-policy": True}
"""The values of ``one_step_off_policy``."""
SEEDS = (0, 1, 2)
STEPS, TEST_EVERY = 24, 3
LONGEST_RUN_S = 3600.0


def learn(models: Models, settings: Settings, one_step_off_policy: bool, folder: Path) -> Curve:
    """Train once, and return the curve."""
    command = training_command(models, folder, settings)
    command.append(f"trainer.v1.reward_pipeline.one_step_off_policy={one_step_off_policy}")
    # verl logs the validation before the training as a step of its own.
    run(command, folder, settings.steps + 1, lambda rows: None, LONGEST_RUN_S)
    return read_report(folder / "metrics.jsonl").accuracy


def mean(curves: Sequence[Curve]) -> Curve:
    """Return the mean of curves that have the same steps."""
    return {step: statistics.mean(curve[step] for curve in curves) for step in curves[0]}


def plot(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draw each run as a thin line, and the mean of each mode as a thick one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for color, (mode, found) in zip(("C0", "C1"), curves.items(), strict=False):
        for curve in found:
            axes.plot(curve.keys(), curve.values(), color=color, linewidth=0.7, alpha=0.5)
        whole = mean(found)
        axes.plot(whole.keys(), whole.values(), color=color, marker="o", label=f"{mode}, mean of {len(found)} seeds")
    axes.set(xlabel="training step", ylabel="exact match, held-out problems")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.learning", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a single short run, to see that it works")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the curves")
    options = parser.parse_args()
    console = Console(stderr=True)
    chosen = QUICK if options.quick else Settings(steps=STEPS, test_every=TEST_EVERY)
    models = make(console, chosen.recipe)
    seeds = SEEDS[:1] if options.quick else SEEDS
    modes = {name: MODES[name] for name in list(MODES)[: 1 if options.quick else None]}
    curves: dict[str, list[Curve]] = {name: [] for name in modes}
    runs = [(seed, name) for seed in seeds for name in modes]
    with tempfile.TemporaryDirectory() as folder:
        for seed, name in track(runs, "Training", console=console):
            settings = replace(chosen, seed=seed, judge_latency=0.0)
            output = Path(folder) / f"{seed}-{modes[name]}"
            try:
                curves[name].append(learn(models, settings, modes[name], output))
            except TrainingFailedError as error:
                print(f"seed {seed}, {name}: {error}", file=sys.stderr)
                return 1
    steps = list(next(iter(curves.values()))[0])
    print(f"{'exact match after steps':28}" + "".join(f"{step:>7}" for step in steps))
    for name, found in curves.items():
        for seed, curve in zip(seeds, found, strict=True):
            print(f"{f'{name}, seed {seed}':28}" + "".join(f"{curve[step]:>7.1%}" for step in steps))
        print(f"{f'{name}, mean':28}" + "".join(f"{share:>7.1%}" for share in mean(found).values()))
    if options.picture is not None:
        plot(curves, options.picture)
    means = {name.replace(" ", "_").replace("-", "_"): mean(found) for name, found in curves.items()}
    print(json.dumps({"seeds": len(seeds), **{name: list(curve.values()) for name, curve in means.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
