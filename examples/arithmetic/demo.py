"""Teaches a small language model to add, with verl's GRPO and a reward model behind HTTP, on a CPU, in minutes.

    python -m examples.arithmetic.demo [--quick]

The demo creates the models (they are cached), trains the policy, and prints a report: accuracy on held-out problems
before and after training, the time of each phase, and the number of rewards by outcome.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

# OpenMP threads that wait actively waste shared cores. Set before torch is loaded, which reads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.arithmetic.models import Artifacts, Split, make_models
from examples.arithmetic.report import Report, plot, read_report
from examples.training import TrainingProcess

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "arithmetic"
LOG_TAIL = 40
POLL_S = 0.25


@dataclass(frozen=True)
class Settings:
    """The settings of a training run."""

    steps: int = 24
    prompts: int = 32
    """Problems per step."""
    answers: int = 8
    """Answers per problem."""
    mini_batch: int = 8
    """Problems per update."""
    learning_rate: float = 5e-5
    test_every: int = 6
    validate: int = 256
    """Problems per validation."""
    validate_on: Split = "held_out"
    judge_latency: float = 3.0
    """Mean additional latency of the judge in seconds. The default is about the duration of a step's generation."""
    seed: int = 0
    engine: str = "transformers"
    """The inference engine that serves the reward model."""


QUICK = Settings(steps=4, test_every=4, validate=128, judge_latency=2.0)


def training_command(artifacts: Artifacts, output: Path, settings: Settings) -> list[str]:
    """Return the command that trains. All options are verl's; only the module is reward_loop's."""
    return [
        sys.executable,
        *("-m", "reward_loop.verl.main_ppo", "--config-name", "cpu"),
        "algorithm.adv_estimator=grpo",
        f"data.train_files={artifacts.data['train']}",
        f"data.val_files={artifacts.data[settings.validate_on]}",
        f"data.val_max_samples={settings.validate}",
        f"data.train_batch_size={settings.prompts}",
        "data.max_prompt_length=16",
        "data.max_response_length=5",
        f"actor_rollout_ref.model.path={artifacts.policy}",
        f"data.seed={settings.seed}",
        f"actor_rollout_ref.rollout.seed={settings.seed}",
        f"actor_rollout_ref.rollout.n={settings.answers}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={settings.mini_batch}",
        f"actor_rollout_ref.actor.optim.lr={settings.learning_rate}",
        "trainer.v1.trainer_mode=reward_pipeline",
        "trainer.v1.reward_pipeline.mini_batch_pipeline=True",
        "trainer.v1.reward_pipeline.one_step_off_policy=True",
        "reward_model.enable=True",
        f"reward_model.model.path={artifacts.reward_model}",
        f"reward_model.rollout.name={settings.engine}",
        f"custom_reward_function.path={HERE / 'reward.py'}",
        "custom_reward_function.name=compute_score",
        f"+custom_reward_function.reward_kwargs.latency_s={settings.judge_latency}",
        f"trainer.total_training_steps={settings.steps}",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=True",
        f"trainer.test_freq={settings.test_every}",
        "trainer.save_freq=-1",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={output / 'checkpoints'}",
        f"trainer.rollout_data_dir={output / 'rollouts'}",
        f"trainer.validation_data_dir={output / 'validation'}",
        f"hydra.run.dir={output / 'hydra'}",
    ]


class Display:
    """The progress display: a progress bar on a terminal, and permanent lines for results."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._shown: set[tuple[str, int]] = set()

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def task(self, description: str, total: float | None = None) -> TaskID:
        if not self.console.is_terminal:
            self.console.print(f"{description} ...")
        return self._progress.add_task(description, total=total, detail="")

    def update(self, task: TaskID, **fields: Any) -> None:
        self._progress.update(task, **fields)

    def remove(self, task: TaskID) -> None:
        self._progress.remove_task(task)

    def show(self, report: Report, task: TaskID, steps: int) -> None:
        """Show the new entries of the report."""
        if report.steps:
            step = report.steps[-1]
            detail = f"step {step.number}/{steps}  reward {step.reward:.3f}  {step.seconds:.1f} s a step"
            self.update(task, description="Training", total=steps, completed=step.number, detail=detail)
        rewards = {step.number: step for step in report.steps}
        for number, accuracy in report.accuracy.items():
            if ("accuracy", number) not in self._shown:
                self._shown.add(("accuracy", number))
                after = rewards.get(number)
                more = f"   reward {after.reward:.3f}   {after.seconds:.1f} s a step" if after else "   before training"
                self.console.print(f"step {number:3d}   exact match {accuracy:6.1%}{more}", highlight=False)


def make(display: Display) -> Artifacts:
    """Create the models, or load them from the cache."""
    task = display.task("Making the models", total=1.0)
    artifacts = make_models(
        CACHE, report=lambda share, detail: display.update(task, completed=share, detail=escape(detail))
    )
    display.remove(task)
    figures = artifacts.figures
    how = "cached" if artifacts.cached else f"made in {figures['seconds']:.0f} s"
    display.console.print(
        f"Models {how}: a policy of {figures['parameters'] / 1e6:.1f} million parameters, and a reward model that is "
        f"right about {figures['reward_model_accuracy']:.1%} of held-out answers",
        highlight=False,
    )
    return artifacts


def train(display: Display, artifacts: Artifacts, output: Path, settings: Settings) -> int:
    """Train with a progress display, and return the exit status."""
    metrics_file = output / "metrics.jsonl"
    task = display.task("Starting Ray, verl and the reward model")
    with TrainingProcess(training_command(artifacts, output, settings), output / "train.log", metrics_file) as training:
        while (status := training.status()) is None:
            time.sleep(POLL_S)
            display.show(read_report(metrics_file), task, settings.steps)
    display.show(read_report(metrics_file), task, settings.steps)
    return status


def conclude(console: Console, report: Report, output: Path, seconds: dict[str, float]) -> None:
    """Print the report, and write it to ``output``."""
    summary = report.as_dict() | {"seconds": seconds}
    (output / "report.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot(report, output / "curves.png")

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("Exact match on held-out problems", f"[bold]{report.before:.1%} -> {report.after:.1%}[/bold]")
    shown = [report.steps[0], report.steps[len(report.steps) // 2], report.steps[-1]]
    rewards = " -> ".join(f"{step.reward:.3f}" for step in shown)
    table.add_row("Mean reward", f"{rewards} (steps {', '.join(str(step.number) for step in shown)})")
    table.add_row("Rewards", ", ".join(f"{count:,} {name}" for name, count in report.outcomes.items()))
    all_steps = sum(step.seconds for step in report.steps)
    table.add_row("Seconds a step (median), all steps", f"{report.seconds_per_step:7.2f} {all_steps:8.1f}")
    for phase, value in report.seconds_by_phase.items():
        table.add_row(f"  {phase}", f"{value:7.2f} {report.total_by_phase[phase]:8.1f}")
    for name, value in _judging(report).items():
        table.add_row(name, value)
    table.add_row("Seconds in all", f"{seconds['total']:.0f}, of them {seconds['models']:.0f} for the models")
    table.add_row("Written", f"report.json, curves.png, samples, logs in\n{escape(_readable(output))}")
    console.print()
    console.print(table, highlight=False)


def _judging(report: Report) -> dict[str, str]:
    """Return the table rows about judging and how much of it was hidden behind generation and training."""
    totals, medians = report.totals, report.overlap
    if not totals:
        return {}
    rows = {
        "Seconds of judging": f"{medians['judging_s']:7.2f} {totals['judging']:8.1f}",
        "  hidden behind the rest": f"{'':7} {totals['hidden']:8.1f} ({totals['hidden_share']:.1%})",
        "  waited for": f"{medians.get('waiting_for_rewards_s', 0.0):7.2f} {totals['waited']:8.1f}",
        "All steps without overlap": f"{'':7} {totals['without_overlap']:8.1f}",
    }
    if "floor_s" in medians:
        rows["Least seconds a step could take"] = f"{medians['floor_s']:7.2f}"
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser("python -m examples.arithmetic.demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller steps, to see that it works")
    parser.add_argument(
        "--steps", type=int, metavar="N", help=f"training steps ({Settings.steps}; quick: {QUICK.steps})"
    )
    parser.add_argument(
        "--judge-latency",
        type=float,
        metavar="S",
        help=f"seconds that the judge takes longer than it would, on average ({Settings.judge_latency:g}); 0: none",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the training; the models stay the same (0)")
    parser.add_argument(
        "--development",
        action="store_const",
        const="development",
        dest="validate_on",
        help="validate on the problems that settings are chosen by, and not on those that the report is about",
    )
    parser.add_argument(
        "--engine", choices=["transformers", "vllm"], help=f"what serves the reward model ({Settings.engine})"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/arithmetic"), metavar="DIR", help="default: %(default)s"
    )
    arguments = parser.parse_args(argv)
    if arguments.steps is not None and arguments.steps < 1:
        parser.error("--steps: at least 1")
    if arguments.judge_latency is not None and not 0 <= arguments.judge_latency < float("inf"):
        parser.error("--judge-latency: 0 or more seconds")
    given = {name: value for name, value in vars(arguments).items() if value is not None and hasattr(Settings, name)}
    settings = replace(QUICK if arguments.quick else Settings(), **given)
    output = arguments.output.resolve()
    console = Console()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return run(console, output, settings)
    except KeyboardInterrupt:
        console.print("Interrupted; nothing is left running.")
        return 130


def run(console: Console, output: Path, settings: Settings) -> int:
    """Create the models, train and report. Returns the exit status."""
    clear(output)
    started = time.monotonic()
    with Display(console) as display:
        artifacts = make(display)
        made = time.monotonic()
        status = train(display, artifacts, output, settings)
    report = read_report(output / "metrics.jsonl")
    if status != 0:
        log = output / "train.log"
        lines = log.read_text(errors="replace").splitlines()
        console.print("\n".join(lines[-LOG_TAIL:]), markup=False, highlight=False)
        console.print(f"\nThe training failed with status {status}. The whole log: {log}", markup=False)
        return 1
    if not report.steps or report.before is None:
        console.print(f"The training logged no metrics. The whole log: {output / 'train.log'}", markup=False)
        return 1
    ended = time.monotonic()
    seconds = {"models": made - started, "training": ended - made, "total": ended - started}
    conclude(console, report, output, seconds)
    return 0


def clear(output: Path) -> None:
    """Create the folder, and remove the files of an earlier run."""
    output.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "train.log", "report.json", "curves.png"):
        (output / name).unlink(missing_ok=True)
    for name in ("rollouts", "validation", "hydra"):
        shutil.rmtree(output / name, ignore_errors=True)


def _readable(path: Path) -> str:
    """Return the path relative to the current folder if it is inside, else unchanged."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
