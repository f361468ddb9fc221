"""Teaches a small language model to add, with verl's GRPO and a reward model behind HTTP, on a CPU, in minutes.

    python -m examples.arithmetic.demo [--quick]
    python -m examples.arithmetic.demo --rule substring    # a rule with a hole instead of the reward model

The demo creates the models (they are cached), trains the policy, says what happened, and on a terminal shows the
records in the viewer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

# OpenMP threads that wait actively waste shared cores. Set before torch is loaded, which reads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pyarrow.parquet as pq
from rich.console import Console

from examples.arithmetic import reward
from examples.arithmetic.models import Models, Recipe, WeakRewardModelError, make_models
from examples.arithmetic.report import Report, plot, read_report
from examples.arithmetic.reward import CHEAP, STRONG
from examples.training import TrainingProcess
from reward_loop import RewardSample
from reward_loop.offline.check import check
from reward_loop.records.reader import read_rows
from reward_loop.records.trainer_events import health

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "arithmetic"
RECORDS = Path("checkpoints", "rewards")
"""Where a run of verl writes its records, below the output folder."""
UNSEEN = ("off by 1", "off by 2", "off by 10", "carry invented", "digits swapped", "digit wrong")
"""The kinds of near misses that the weak reward model is not trained on."""
LAST = 5
"""The number of last steps whose wrong answers are counted."""
SPOT_ANSWERS = 16
"""Answers per problem with spot checks: the reward of a checked answer has a larger variance than others, and with 8
answers three seeds of 48 steps ended nearly 3 percentage points lower."""
RULE_LENGTH = 12
"""Tokens of an answer that a rule with a hole scores: enough for several candidates."""
CHECKED_ROWS = 50
LOG_TAIL = 40
POLL_S = 0.25


@dataclass(frozen=True)
class Settings:
    """The settings of a training run."""

    steps: int = 36
    prompts: int = 32
    """Problems per step."""
    answers: int = 8
    """Answers per problem."""
    test_every: int = 6
    validate: int = 256
    """Problems per validation."""
    judge_latency: float = 3.0
    """Mean additional latency of the judge in seconds. The default is about the duration of a step's generation."""
    seed: int = 0
    """Seed of the models and of the training."""
    engine: str = "transformers"
    """The inference engine that serves the reward model."""
    weak_judge: bool = False
    """Whether the reward model is trained without the near misses of `UNSEEN`: the policy learns to exploit it."""
    spot: float | None = None
    """The share of answers that a good reward model checks, if the reward model is weak."""
    rule: str | None = None
    """The rule with a hole that scores the answers instead of a reward model: a function of `reward.py`."""
    response_length: int = 5
    """Tokens of an answer."""
    recipe: Recipe = field(default_factory=Recipe)
    """The parameters of the models."""


QUICK = Settings(steps=4, test_every=4, validate=128, judge_latency=2.0, recipe=Recipe(steps=120, bound=0.0))


def training_command(models: Models, output: Path, settings: Settings, strong: Models | None = None) -> list[str]:
    """Return the command that trains on a CPU; ``strong`` has the reward model of spot checks."""
    command = [sys.executable, "-m", "examples.verl_cpu"]
    return command + training_options(models, output, settings) + spot_options(strong, settings)


def spot_options(strong: Models | None, settings: Settings) -> list[str]:
    """Return the options with which a second reward model is served and checks a share of the answers."""
    if strong is None:
        return []
    server = "+reward_model.server"
    return [
        f"+custom_reward_function.reward_kwargs.spot={settings.spot}",
        f"{server}.served_model_name={CHEAP}",
        f"{server}.models.{STRONG}.model_path={strong.directory / 'reward_model'}",
        f"{server}.models.{STRONG}.engine={settings.engine}",
        # Divided by the standard deviation of the group, the advantage would not have the mean of the strong judge's.
        "algorithm.norm_adv_by_std_in_grpo=False",
    ]


def training_options(models: Models, output: Path, settings: Settings) -> list[str]:
    """Return the options of a training. Nearly all are verl's."""
    return [
        *reward_options(models, settings),
        # Both overlaps: judging continues during the update and the rollout of the next step. With spot checks, only
        # the first: corrections are rare and large, and one that arrives a step later leaves more wrong answers.
        "trainer.v1.trainer_mode=reward_pipeline",
        "trainer.v1.reward_pipeline.mini_batch_pipeline=True",
        f"trainer.v1.reward_pipeline.one_step_off_policy={settings.spot is None}",
        # The policy and its training.
        f"actor_rollout_ref.model.path={models.directory / 'policy'}",
        f"actor_rollout_ref.rollout.n={settings.answers}",
        f"actor_rollout_ref.rollout.seed={settings.seed}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=5e-5",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={models.directory / 'train.parquet'}",
        f"data.val_files={models.directory / 'held_out.parquet'}",
        f"data.val_max_samples={settings.validate}",
        f"data.train_batch_size={settings.prompts}",
        f"data.seed={settings.seed}",
        "data.max_prompt_length=8",
        f"data.max_response_length={settings.response_length}",
        f"trainer.total_training_steps={settings.steps}",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=True",
        f"trainer.test_freq={settings.test_every}",
        "trainer.save_freq=-1",
        # Right sums have more digits than those without the last carry.
        "reward_loop.health.length_correlation=null",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={output / 'checkpoints'}",
        f"trainer.rollout_data_dir={output / 'rollouts'}",
        f"trainer.validation_data_dir={output / 'validation'}",
        f"hydra.run.dir={output / 'hydra'}",
    ]


def reward_options(models: Models, settings: Settings) -> list[str]:
    """Return the options of the reward function, and of the reward model that it queries."""
    path = f"custom_reward_function.path={HERE / 'reward.py'}"
    if settings.rule is not None:
        return [path, f"custom_reward_function.name={settings.rule}"]
    return [
        path,
        f"+custom_reward_function.reward_kwargs.latency_s={settings.judge_latency}",
        "reward_model.enable=True",
        # By default, twice as many calls as the server computes at a time. These spend most of their time in the
        # additional latency, where they need no server.
        f"+reward_loop.limits.reward_model.max_concurrent={settings.prompts * settings.answers}",
        f"reward_model.model.path={models.directory / 'reward_model'}",
        f"reward.reward_model.rollout.name={settings.engine}",
    ]


def attacked(models: Models, rule: str) -> list[str]:
    """Return what `reward-loop check` finds in a rule before the run, with right answers to the held-out problems."""
    rows = pq.read_table(models.directory / "held_out.parquet").slice(0, CHECKED_ROWS).to_pylist()
    pairs = [(row["prompt"][-1]["content"], row["reward_model"]["ground_truth"]) for row in rows]
    samples = [RewardSample(truth, ground_truth=truth, prompt=question, uid=question) for question, truth in pairs]
    report = asyncio.run(check(getattr(reward, rule), samples[:8], more=samples[8:]))
    return [
        f"{one.check}: {one.text}" for one in report.findings if one.check in ("false positives", "holes of the rule")
    ]


def make(console: Console, recipe: Recipe) -> Models:
    """Create the models, or load them from the cache."""
    with console.status("Making the models") as status:
        models = make_models(CACHE, recipe, report=lambda text: status.update(f"Making the models: {text}"))
    figures = models.figures
    accuracy = ", ".join(f"{kind} {share:.1%}" for kind, share in figures["reward_model_accuracy"].items())
    how = "cached" if models.cached else f"made in {figures['seconds']:.0f} s"
    console.print(
        f"Models {how}: a policy of {figures['parameters'] / 1e6:.1f} million parameters, and a reward model that is "
        f"right about these shares of held-out answers, right ones and wrong ones of each kind:\n  {accuracy}",
        highlight=False,
    )
    return models


def train(console: Console, command: list[str], output: Path) -> int:
    """Train, print a line for each completed step, and return the exit status."""
    shown = 0
    with (
        console.status("Training with verl (starting takes about 40 s)"),
        TrainingProcess(command, output / "train.log", output / "metrics.jsonl") as training,
    ):
        status = None
        while status is None:
            time.sleep(POLL_S)
            status = training.status()
            lines = read_report(output / "metrics.jsonl").lines()
            for line in lines[shown:]:
                console.print(line, highlight=False)
            shown = len(lines)
    return status


def conclude(console: Console, report: Report, output: Path, seconds: dict[str, float]) -> None:
    """Say what happened, and write the whole report to ``output``."""
    (output / "report.json").write_text(json.dumps(report.as_dict() | {"seconds": seconds}, indent=2) + "\n")
    (output / "report.txt").write_text("".join(f"{name:35} {text}\n" for name, text in report.table()))
    plot(report, output / "curves.png")
    lines = [*report.sentences(), *deceived(output / RECORDS), *warned(report, output / RECORDS)]
    lines.append(f"Seconds in all: {seconds['total']:.0f}, of them {seconds['models']:.0f} for the models.")
    command = shortest(Path(sys.executable).with_name("reward-loop"))
    lines += [
        f"\nThe table of phases (report.txt), curves.png and logs are in {shortest(output)}",
        f"All numbers of the rewards: {command} report {shortest(output / RECORDS)}",
        f"Every sample in the browser: {command} view {shortest(output / RECORDS)} --open",
    ]
    console.print("\n" + "\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def deceived(records: Path) -> list[str]:
    """Return sentences about wrong answers that were rewarded, and about the calls of a strong reward model."""
    rows = [row for row in read_rows(records) if row.get("kind") == "sample" and not row["validate"]]
    scored = [(row["generated_step"], row["score"], row["components"]) for row in rows if row["score"] is not None]
    if not scored:
        return []
    last = max(step for step, _, _ in scored) - LAST
    late = [score > 0.5 and not made["acc"] for step, score, made in scored if step > last]
    lines = [f"Of the answers of the last {LAST} steps, {sum(late) / len(late):.1%} were wrong and scored above 0.5."]
    if checked := [made["judged_by"] == STRONG for _, _, made in scored if "judged_by" in made]:
        lines.append(f"The strong reward model checked {sum(checked):,} of {len(checked):,} answers.")
    return lines


def warned(report: Report, records: Path) -> list[str]:
    """Return a sentence about the first warning of the run's live numbers."""
    warnings = health(records)
    if not warnings:
        return ["The live numbers of the run gave no warning."]
    first = warnings[0]
    reward = {step.number: step.reward for step in report.steps}[first["step"]]
    return [
        f"First warning of the live numbers (of {len(warnings)}), in step {first['step']}, at a mean reward of "
        f"{reward:.2f}:\n  {first['monitor']}: {first['message'].partition('. ')[0]}."
    ]


def show(output: Path) -> None:
    """Replace this process by the viewer, which ends with Ctrl-C."""
    command = [sys.executable, "-m", "reward_loop", "view", str(output / RECORDS), "--port", "0"]
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        command.append("--open")
    print("\nThe viewer shows them until you press Ctrl-C (--no-view leaves it out):", flush=True)
    os.execv(sys.executable, command)


def shortest(path: Path) -> Path:
    """Return the path, relative to the current directory if it lies in it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def run(console: Console, output: Path, settings: Settings) -> int:
    """Create the models, train and report. Returns the exit status."""
    clear(output)
    started = time.monotonic()
    recipe = replace(settings.recipe, seed=settings.seed, unseen=UNSEEN if settings.weak_judge else ())
    try:
        models = make(console, recipe)
        strong = None if settings.spot is None else make(console, replace(recipe, unseen=()))
    except WeakRewardModelError as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    if settings.rule is not None:
        lines = [f"reward-loop check names the holes of `{settings.rule}`:", *attacked(models, settings.rule)]
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    made = time.monotonic()
    status = train(console, training_command(models, output, settings, strong), output)
    report, log = read_report(output / "metrics.jsonl"), output / "train.log"
    if status != 0:
        tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL:]
        console.print("\n".join(tail), markup=False, highlight=False)
        console.print(f"\nThe training failed with status {status}. The whole log: {log}", markup=False)
        return 1
    if not report.steps or not report.accuracy:
        console.print(f"The training logged no metrics. The whole log: {log}", markup=False)
        return 1
    ended = time.monotonic()
    seconds = {"models": made - started, "training": ended - made, "total": ended - started}
    conclude(console, report, output, seconds)
    return 0


def clear(output: Path) -> None:
    """Create the folder, and remove the files of an earlier run."""
    output.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "train.log", "report.json", "report.txt", "curves.png"):
        (output / name).unlink(missing_ok=True)
    for name in ("checkpoints", "rollouts", "validation", "hydra"):
        shutil.rmtree(output / name, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser("python -m examples.arithmetic.demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller steps and weaker models, to see that it works")
    parser.add_argument(
        "--steps", type=int, metavar="N", help=f"training steps ({Settings.steps}; quick: {QUICK.steps})"
    )
    parser.add_argument(
        "--judge-latency",
        type=float,
        metavar="S",
        help=f"mean additional latency of the judge in seconds ({Settings.judge_latency:g}); 0 for none",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the models and of the training (0)")
    parser.add_argument(
        "--engine", choices=["transformers", "vllm"], help=f"engine that serves the reward model ({Settings.engine})"
    )
    parser.add_argument(
        "--weak-judge",
        action="store_true",
        help="a reward model that accepts near misses: the policy exploits it",
    )
    parser.add_argument(
        "--spot",
        type=float,
        metavar="P",
        help="with --weak-judge: a good reward model checks this share of the answers, 16 for each problem",
    )
    parser.add_argument(
        "--rule", choices=["substring"], help="no reward model, but a rule with a hole: the policy may exploit it"
    )
    parser.add_argument("--no-view", action="store_true", help="do not start the viewer at the end")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/arithmetic"), metavar="DIR", help="default: %(default)s"
    )
    arguments = parser.parse_args(argv)
    if arguments.steps is not None and arguments.steps < 1:
        parser.error("--steps: at least 1")
    if arguments.judge_latency is not None and not 0 <= arguments.judge_latency < float("inf"):
        parser.error("--judge-latency: 0 or more seconds")
    if arguments.spot is not None and not (arguments.weak_judge and 0 < arguments.spot <= 1):
        parser.error("--spot: above 0, at most 1, and only with --weak-judge")
    if arguments.rule is not None and (arguments.weak_judge or arguments.engine or arguments.judge_latency is not None):
        parser.error("--rule: there is no reward model then; leave out --weak-judge, --engine and --judge-latency")
    given = {name: value for name, value in vars(arguments).items() if value is not None and hasattr(Settings, name)}
    if arguments.spot is not None:
        given["answers"] = SPOT_ANSWERS
    if arguments.rule is not None:
        given["response_length"] = RULE_LENGTH
    settings = replace(QUICK if arguments.quick else Settings(), **given)
    console = Console()
    signal.signal(signal.SIGTERM, _interrupt)
    output = arguments.output.resolve()
    try:
        status = run(console, output, settings)
        if status == 0 and console.is_terminal and not arguments.no_view and not os.environ.get("CI"):
            show(output)
        return status
    except KeyboardInterrupt:
        console.print("Interrupted; all processes have ended.")
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
