"""Runs verl's trainer on a CPU, as shipped and in our modes, always with the same policy, data, seeds and judge."""

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

from examples import verl_cpu
from examples.tiny_models import build_tiny_model
from examples.training import TrainingProcess, read_metrics, write_dataset
from reward_loop.verl.options import PIPELINE_MODE

__all__ = [
    "BLOCK",
    "FIRST",
    "INTERVALS",
    "LATENCY",
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
    "options",
    "prepare",
    "rows",
    "run",
    "seconds_of_judging",
    "write_scale",
]

HERE = Path(__file__).parent
PROMPTS, RESPONSES = 32, 4
LATENCY, CONCURRENCY = (0.1, 0.4), 8
"""The shortest and the longest judge call in seconds, before scaling, and the maximum number of concurrent calls."""
FIRST = 2
"""Number of steps at the start of a run that are not counted, because they load and allocate."""
SETTLING = 3
"""Number of further steps that are not counted, in the run that sets the judge's scale."""
BLOCK = 2
"""Number of counted steps per turn. The step before them is not counted: its judging ran during the turn of the other
run."""
CALIBRATING = 3
"""Number of latest steps from which the judge's scale is computed."""
TRAINING = tuple(f"timing_s/{part}" for part in ("old_log_prob", "adv", "update_actor", "update_weights"))
LONGEST_RUN_S = 900.0
ENDING_S = 10.0
NEVER = 100_000
"""A number of steps that a run never reaches."""
LOG_TAIL = 30
LOOK_S = 0.1


class TrainingFailedError(Exception):
    """A run ended with an error, too early, or not before the timeout. The message contains the end of its log.

    Attributes:
        log: the file of the whole log.
        summary: how the run ended.
    """

    def __init__(self, log: Path, summary: str) -> None:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL:])
        super().__init__(f"{tail}\n\n{log}: {summary}")
        self.log = log
        self.summary = summary


@dataclass(frozen=True)
class Mode:
    """A training mode, with its command-line arguments."""

    name: str
    command: tuple[str, ...]


IN_TURN = ("-P", str(HERE / "verl_in_turn.py"))
"""With `-P`, the folder of the script is not on the path of modules: `trl.py` there has the name of a package."""


def _ours(mini_batch_pipeline: bool, one_step_off_policy: bool) -> tuple[str, ...]:
    return (
        *(*IN_TURN, *verl_cpu.ARGUMENTS),
        f"trainer.v1.trainer_mode={PIPELINE_MODE}",
        f"trainer.v1.{PIPELINE_MODE}.mini_batch_pipeline={mini_batch_pipeline}",
        f"trainer.v1.{PIPELINE_MODE}.one_step_off_policy={one_step_off_policy}",
    )


MODES = {
    "both": Mode("ours, both overlaps", _ours(True, True)),
    "verl": Mode("verl, sync", (*IN_TURN, *verl_cpu.ARGUMENTS)),
    "mini_batch": Mode("ours, mini-batch pipeline", _ours(True, False)),
    "off_policy": Mode("ours, one-step off-policy", _ours(False, True)),
}
POLL_S = 2.0
"""verl's polling interval as shipped, in seconds."""
INTERVALS = {"shipped": "verl, sync, as shipped (polls every 2.0 s)", "0.05": "verl, sync, polls every 0.05 s"}
"""verl's polling intervals: the first in odd steps, the second in even steps."""


@dataclass(frozen=True)
class Steps:
    """The counted steps of a run."""

    rows: list[dict[str, float]]

    def mean(self, *names: str) -> float:
        """Return the mean over steps of the sum of some metrics; a metric that was not logged counts as 0.

        Not the median: if verl polls every two seconds, steps have one of two lengths, depending on the polls.
        """
        return statistics.fmean(sum(row.get(name, 0.0) for name in names) for row in self.rows)

    @property
    def seconds(self) -> float:
        """Mean length of a step in seconds, without logging and checkpoints."""
        return self.mean("timing_s/step")

    @property
    def generation(self) -> float:
        """Mean generation time in seconds: G in our modes, generation and judging in verl's mode."""
        return self.mean("timing_s/gen")

    @property
    def waiting_share(self) -> float:
        """Mean share of a step in which the trainer waited for rewards; only our modes log it."""
        return self.mean("reward_pipeline/waiting_share")

    @property
    def working(self) -> float:
        """T: mean time in seconds of all work of the trainer on a batch after it was generated and judged."""
        return self.mean(*TRAINING)

    @property
    def without_judging(self) -> float:
        """G + T in our modes, in seconds."""
        return self.mean("timing_s/gen", *TRAINING)

    @property
    def text(self) -> str:
        """The mean seconds of a step and of its parts."""
        judged = "" if self.rows[0].get("reward_pipeline/generation_s") is not None else " and judging"
        waited = self.mean("reward_pipeline/waiting_for_rewards_s")
        return f"{self.seconds:.2f} s a step: {self.generation:.2f} generation{judged}, {self.working:.2f} training" + (
            "" if judged else f", {waited:.2f} waiting for rewards"
        )


def seconds_of_judging(scale: float, samples: int = PROMPTS * RESPONSES, concurrency: int = CONCURRENCY) -> float:
    """Return R: the mean judging time of a step at full concurrency, in seconds."""
    return scale * samples * statistics.mean(LATENCY) / concurrency


def write_scale(file: Path, scale: float) -> None:
    """Set the number by which `judge.py` multiplies its latencies, also of a run in progress."""
    new = file.with_suffix(".new")
    new.write_text(str(scale))
    new.replace(file)


class Calibration:
    """Scales the judge latency so that R equals G + T on this machine.

    A run in one of our modes measures G + T; the scale is updated after each of its steps. The other run uses the mean
    scale of the counted steps before its turn.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._scales: list[float] = []
        """The scale during each step of the run."""
        self._set(1.0)

    def look(self, rows: list[dict[str, float]]) -> None:
        """Update the scale from the metrics of the steps so far."""
        for made in range(len(self._scales) + 1, len(rows) + 1):
            self._scales.append(self.scale)
            latest = rows[max(FIRST, made - CALIBRATING) : made]
            if latest:
                self._set(Steps(latest).without_judging / seconds_of_judging(1.0))

    def hold(self, steps: int, longer: float = 0.0) -> float:
        """Set the scale to the mean over the latest steps, and return R for that scale, in seconds.

        Args:
            steps: number of latest steps.
            longer: seconds by which the judging of a step takes longer than R.
        """
        judging = seconds_of_judging(statistics.fmean(self._scales[-steps:]))
        self._set((judging + longer) / seconds_of_judging(1.0))
        return judging

    def _set(self, scale: float) -> None:
        self.scale = scale
        write_scale(self._file, scale)


def prepare(folder: Path) -> None:
    """Create the policy (two layers with random weights) and the prompts in ``folder``."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    build_tiny_model(folder / "policy", "generative")
    for split, first, count in (("train", 0, 2 * PROMPTS), ("val", 1000, 8)):
        problems = [(f"{i}+{i + 1}=", str(2 * i + 1)) for i in range(first, first + count)]
        write_dataset(folder / f"{split}.parquet", "sums", split, problems)


def command(mode: Mode, folder: Path, output: Path, steps: int, *overrides: str, **environment: object) -> list[str]:
    """Return the command that trains with the policy and prompts in ``folder`` and the judge ``judge.py``."""
    variables = (
        verl_cpu.environment() | {"JUDGE_LATENCY": json.dumps(LATENCY), "JUDGE_CONCURRENCY": CONCURRENCY} | environment
    )
    return [
        *("env", *(f"{name}={value}" for name, value in variables.items())),
        *(sys.executable, *mode.command),
        *options(folder, output, steps),
        "ray_kwargs.ray_init.num_cpus=16",
        "ray_kwargs.ray_init.num_gpus=1",
        *overrides,
    ]


def options(folder: Path, output: Path, steps: int) -> list[str]:
    """Return the options of the work, which are the same in all modes and on all devices."""
    return [
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
    ]


class InTurn:
    """A training that runs steps only on request; used as a context manager. On exit, all its processes have ended.

    It never reaches its last step, which would differ from the others: no next batch is generated in it.

    Args:
        mode: training mode.
        folder: the folder that `prepare` filled.
        output: folder for log and metrics; it must not exist.
        overrides: additional options of verl.
        environment: additional environment variables; see `command`.
    """

    def __init__(self, mode: Mode, folder: Path, output: Path, *overrides: str, **environment: object) -> None:
        output.mkdir()
        turns = output / "turns"
        os.mkfifo(turns)
        # Keeps the policy constant: a policy that learns to write digits would write longer responses.
        learns_nothing = "actor_rollout_ref.actor.optim.lr=1e-9"
        self._command = command(mode, folder, output, NEVER, learns_nothing, *overrides, TURNS=turns, **environment)
        self._log, self._metrics = output / "log", output / "metrics.jsonl"
        self._turns: int | None = os.open(turns, os.O_RDWR)
        self._steps = 0

    def __enter__(self) -> Self:
        self._training = TrainingProcess(self._command, self._log, self._metrics)
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
        """Close the pipe of turns, which ends the training."""
        if self._turns is not None:
            os.close(self._turns)
            self._turns = None

    def begin(self, steps: int) -> None:
        """Start ``steps`` further steps without waiting for them."""
        assert self._turns is not None
        self._steps += steps
        os.write(self._turns, b"." * steps)

    def finish(self, look: Callable[[list[dict[str, float]]], None] = lambda rows: None) -> list[dict[str, float]]:
        """Wait until all started steps are complete.

        Args:
            look: called repeatedly with the metrics of all steps so far.

        Returns:
            The metrics of all steps.

        Raises:
            TrainingFailedError: the training ended or took too long. The message contains the end of its log.
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
        """Run one step that is not counted and then ``steps`` counted ones, and return the metrics of the latter."""
        self.begin(1 + steps)
        return self.finish(look)[-steps:]


def run(
    command: list[str],
    output: Path,
    steps: int,
    look: Callable[[list[dict[str, float]]], None],
    within_s: float = LONGEST_RUN_S,
) -> list[dict[str, float]]:
    """Run a training to its end, and return the metrics of each step. All its processes have ended afterwards.

    Args:
        command: the command that starts the training.
        output: folder for log and metrics; it must not exist.
        steps: expected number of steps.
        look: called repeatedly with the metrics of the steps so far.
        within_s: seconds that the training may take.

    Raises:
        TrainingFailedError: the training failed, took too long or made another number of steps. The message contains
            the end of its log.
    """
    output.mkdir()
    log, metrics = output / "log", output / "metrics.jsonl"
    deadline = time.monotonic() + within_s
    with TrainingProcess(command, log, metrics) as training:
        while (status := training.status()) is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            look(rows(metrics))
    done = rows(metrics)
    if status != 0 or len(done) != steps:
        raise _failed(log, status, len(done), steps)
    return done


def _failed(log: Path, status: int | None, made: int, steps: int) -> TrainingFailedError:
    ended = "was too slow and was stopped" if status is None else f"ended with status {status}"
    return TrainingFailedError(log, f"{ended} after {made} of {steps} steps")


def rows(metrics: Path) -> list[dict[str, float]]:
    """Return the metrics of each step so far, without a line that is not completely written yet."""
    return [data for _, data in read_metrics(metrics)]
