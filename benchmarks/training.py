"""verl's own trainer on a CPU, as shipped and in our modes: the same policy, data, seeds and judge, run after run."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from examples.arithmetic.demo import Training
from reward_loop.agent.latency import parse_latency
from reward_loop.verl.defaults import CONFIG_DIR, verl_config_dir
from reward_loop.verl.main_ppo import CPU_ENVIRONMENT
from reward_loop.verl.mode_options import PIPELINE_MODE
from tests.tiny_models import build_tiny_model
from tests.verl.runs import write_data

__all__ = [
    "BLOCK",
    "FIRST",
    "INTERVALS",
    "MODES",
    "POLL_S",
    "PROMPTS",
    "RESPONSES",
    "SETTLING",
    "Calibration",
    "InTurn",
    "Mode",
    "Steps",
    "TrainingFailedError",
    "command",
    "prepare",
    "rows",
    "run",
]

HERE = Path(__file__).parent
PROMPTS, RESPONSES = 32, 4
JUDGE, CONCURRENCY = "uniform:0.1:0.4", 8
"""Seconds of a judge call before they are scaled, and how many calls there are at a time."""
FIRST = 2
"""The first steps of a run, which are not counted: they load and allocate."""
SETTLING = 3
"""The steps after those, in the run that sets the judge's scale, which are not counted either."""
BLOCK = 2
"""Steps of a turn that count. The one before them does not: what it waits for went on while the other run had its
turn."""
CALIBRATING = 3
"""The latest steps, of which the judge's scale is made."""
TRAINING = tuple(f"timing_s/{part}" for part in ("old_log_prob", "adv", "update_actor", "update_weights"))
LONGEST_RUN_S = 900.0
ENDING_S = 10.0
NEVER = 100_000
"""More steps than anybody waits for."""
LOG_TAIL = 30
LOOK_S = 0.1


class TrainingFailedError(Exception):
    """A run ended with an error, or not at all."""


@dataclass(frozen=True)
class Mode:
    """A way to train, and what it needs on the command line."""

    name: str
    command: tuple[str, ...]


IN_TURN = str(HERE / "verl_in_turn.py")


def _verl() -> tuple[str, ...]:
    """verl's entry point, trainer and reward loop, with our configuration of a CPU run, whose other keys it ignores."""
    folders = f"hydra.searchpath=[file://{verl_config_dir()},file://{CONFIG_DIR}]"
    return (IN_TURN, "verl", "--config-dir", str(CONFIG_DIR), "--config-name", "cpu", folders)


def _ours(mini_batch_pipeline: bool, one_step_off_policy: bool) -> tuple[str, ...]:
    return (
        *(IN_TURN, "ours", "--config-name", "cpu"),
        f"trainer.v1.trainer_mode={PIPELINE_MODE}",
        f"trainer.v1.{PIPELINE_MODE}.mini_batch_pipeline={mini_batch_pipeline}",
        f"trainer.v1.{PIPELINE_MODE}.one_step_off_policy={one_step_off_policy}",
    )


MODES = {
    "both": Mode("ours, both overlaps", _ours(True, True)),
    "verl": Mode("verl, sync", _verl()),
    "mini_batch": Mode("ours, mini-batch pipeline", _ours(True, False)),
    "off_policy": Mode("ours, one-step off-policy", _ours(False, True)),
}
POLL_S = 2.0
"""As shipped."""
INTERVALS = {"shipped": "verl, sync, as shipped (polls every 2.0 s)", "0.05": "verl, sync, polls every 0.05 s"}
"""How often verl polls in its odd steps, and in its even ones."""


@dataclass(frozen=True)
class Steps:
    """Steps of a run that count."""

    rows: list[dict[str, float]]

    def mean(self, *names: str) -> float:
        """Return the mean over steps of the sum of some metrics; one that is not logged counts 0.

        Not the median: where verl polls every two seconds, steps are of two lengths, by how the polls fall."""
        return statistics.fmean(sum(row.get(name, 0.0) for name in names) for row in self.rows)

    @property
    def seconds(self) -> float:
        """The length of a step, without the log and checkpoints around it."""
        return self.mean("timing_s/step")

    @property
    def generation(self) -> float:
        """G in our modes; in verl's, generation and judging."""
        return self.mean("timing_s/gen")

    @property
    def waiting_share(self) -> float:
        """The share of a step in which the trainer waited for rewards, where it can be told."""
        return self.mean("reward_pipeline/waiting_share")

    @property
    def working(self) -> float:
        """T: all that the trainer does with a batch once it is generated and judged."""
        return self.mean(*TRAINING)

    @property
    def without_judging(self) -> float:
        """G + T in our modes."""
        return self.mean("timing_s/gen", *TRAINING)


def _seconds_of_judging(scale: float) -> float:
    """R: all judging of a step, on average, at full concurrency."""
    return scale * PROMPTS * RESPONSES * parse_latency(JUDGE).mean / CONCURRENCY


class Calibration:
    """Makes judging take as long as generation and training do on this machine. A run of ours measures those; after
    each of its steps, the scale is set anew. The other run has the mean scale of our steps that count before it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._scales: list[float] = []
        """That of each step of the run."""
        self._set(1.0)

    def look(self, rows: list[dict[str, float]]) -> None:
        """Sees the metrics of the steps so far."""
        for made in range(len(self._scales) + 1, len(rows) + 1):
            self._scales.append(self.scale)
            latest = rows[max(FIRST, made - CALIBRATING) : made]
            if latest:
                self._set(Steps(latest).without_judging / _seconds_of_judging(1.0))

    def hold(self, steps: int, longer: float = 0.0) -> float:
        """Sets the scale to the mean of the latest ``steps``; returns R with that.

        Args:
            steps: how many.
            longer: seconds by which judging a step is to take longer than R.
        """
        judging = _seconds_of_judging(statistics.fmean(self._scales[-steps:]))
        self._set((judging + longer) / _seconds_of_judging(1.0))
        return judging

    def _set(self, scale: float) -> None:
        self.scale = scale
        new = self._file.with_suffix(".new")
        new.write_text(str(scale))
        new.replace(self._file)


def prepare(folder: Path) -> None:
    """Make the policy, two layers with random weights, and the prompts."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    build_tiny_model(folder / "policy", "generative")
    write_data(folder, prompts=2 * PROMPTS)


def command(mode: Mode, folder: Path, output: Path, steps: int, *overrides: str, **environment: object) -> list[str]:
    """The command that trains for some steps on what is in ``folder``, judged by ``judge.py``."""
    variables = CPU_ENVIRONMENT | {"JUDGE_LATENCY": JUDGE, "JUDGE_CONCURRENCY": CONCURRENCY} | environment
    return [
        *("env", *(f"{name}={value}" for name, value in variables.items())),
        *(sys.executable, *mode.command),
        f"actor_rollout_ref.model.path={folder / 'policy'}",
        f"actor_rollout_ref.rollout.n={RESPONSES}",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        f"data.train_batch_size={PROMPTS}",
        "data.seed=1",
        "data.max_prompt_length=64",
        "data.max_response_length=128",
        f"reward.custom_reward_function.path={HERE / 'judge.py'}",
        "reward.custom_reward_function.name=compute_score",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={output}/checkpoints",
        f"hydra.run.dir={output}",
        "ray_kwargs.ray_init.num_cpus=16",
        "ray_kwargs.ray_init.num_gpus=1",
        *overrides,
    ]


class InTurn:
    """A training that makes steps when it is told to, and otherwise waits. A context manager, at whose end all its
    processes are gone. It never comes to its last step, in which nothing is generated for a next one.

    Args:
        mode: how it trains.
        folder: where `prepare` was called.
        output: a folder for its log and metrics, which is made.
        environment: more variables; see `command`.
    """

    def __init__(self, mode: Mode, folder: Path, output: Path, **environment: object) -> None:
        output.mkdir()
        turns = output / "turns"
        os.mkfifo(turns)
        # The policy stays as it is: one that learned to write digits would write longer responses.
        learns_nothing = "actor_rollout_ref.actor.optim.lr=1e-9"
        self._command = command(mode, folder, output, NEVER, learns_nothing, TURNS=turns, **environment)
        self._log, self._metrics = output / "log", output / "metrics.jsonl"
        self._turns: int | None = os.open(turns, os.O_RDWR)
        self._steps = 0

    def __enter__(self) -> Self:
        self._training = Training(self._command, self._log, self._metrics)
        self._training.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        deadline = time.monotonic() + ENDING_S
        while kind is None and self._training.status() is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        self._training.__exit__(kind, error, trace)

    def end(self) -> None:
        """Gives it no more turns, so that it ends."""
        if self._turns is not None:
            os.close(self._turns)
            self._turns = None

    def begin(self, steps: int) -> None:
        """Lets it make so many more steps, and does not wait for them."""
        assert self._turns is not None
        self._steps += steps
        os.write(self._turns, b"." * steps)

    def finish(self, look: Callable[[list[dict[str, float]]], None] = lambda rows: None) -> list[dict[str, float]]:
        """Waits until it has made all the steps that it may make.

        Args:
            look: is shown the metrics of all its steps so far, again and again.

        Returns:
            The metrics of all its steps.

        Raises:
            TrainingFailedError: it ended, or took too long; the end of its log is in the message.
        """
        deadline = time.monotonic() + LONGEST_RUN_S
        while (status := self._training.status()) is None and time.monotonic() < deadline:
            done = rows(self._metrics)
            look(done)
            if len(done) >= self._steps:
                return done
            time.sleep(LOOK_S)
        raise _failed(self._log, status, len(rows(self._metrics)), self._steps)

    def turn(
        self, steps: int, look: Callable[[list[dict[str, float]]], None] = lambda rows: None
    ) -> list[dict[str, float]]:
        """Makes one step that does not count and then so many that do, and returns the metrics of those."""
        self.begin(1 + steps)
        return self.finish(look)[-steps:]


def run(
    command: list[str], output: Path, steps: int, look: Callable[[list[dict[str, float]]], None]
) -> list[dict[str, float]]:
    """Run a training to its end, in processes that are all gone afterwards; returns the metrics of each step.

    Args:
        command: starts it.
        output: a folder for its log and metrics, which is made.
        steps: how many steps it makes.
        look: is shown the metrics of the steps so far, again and again.

    Raises:
        TrainingFailedError: it ended with an error; the end of its log is in the message.
    """
    output.mkdir()
    log, metrics = output / "log", output / "metrics.jsonl"
    deadline = time.monotonic() + LONGEST_RUN_S
    with Training(command, log, metrics) as training:
        while (status := training.status()) is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            look(rows(metrics))
    done = rows(metrics)
    if status != 0 or len(done) != steps:
        raise _failed(log, status, len(done), steps)
    return done


def _failed(log: Path, status: int | None, made: int, steps: int) -> TrainingFailedError:
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL:])
    return TrainingFailedError(f"{tail}\n\n{log}: ended with status {status} after {made} of {steps} steps")


def rows(metrics: Path) -> list[dict[str, float]]:
    """The metrics of each step so far, without a line that is being written."""
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines(keepends=True)
    return [json.loads(line)["data"] for line in lines if line.endswith("\n")]
