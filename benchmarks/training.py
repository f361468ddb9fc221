"""verl's own trainer on a CPU, as shipped and in our modes: the same policy, data, seeds and judge, run after run."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from examples.arithmetic.demo import Training
from reward_loop.agent.latency import parse_latency
from reward_loop.verl.main_ppo import CPU_ENVIRONMENT
from reward_loop.verl.options import CONFIG_DIR, PIPELINE_MODE, verl_config_dir
from tests.tiny_models import build_tiny_model
from tests.verl.runs import write_data

HERE = Path(__file__).parent
PROMPTS, RESPONSES = 32, 4
JUDGE, CONCURRENCY = "uniform:0.1:0.4", 8
JUDGING_S = PROMPTS * RESPONSES * parse_latency(JUDGE).mean / CONCURRENCY
"""All judging of a step, on average, at full concurrency."""
WARM_UP = 2
"""The first steps, which are not counted, nor is the last, during which nothing else is generated."""
LONGEST_RUN_S = 900.0
LOG_TAIL = 30
LOOK_S = 0.25


class TrainingFailedError(Exception):
    """A run ended with an error, or not at all."""


@dataclass(frozen=True)
class Mode:
    """A way to train, and what it needs on the command line."""

    name: str
    command: tuple[str, ...]
    environment: tuple[str, ...] = ()


def _verl(*command: str) -> tuple[str, ...]:
    """verl's entry point, trainer and reward loop, with our configuration of a CPU run, whose other keys it ignores."""
    folders = f"hydra.searchpath=[file://{verl_config_dir()},file://{CONFIG_DIR}]"
    return (*command, "--config-dir", str(CONFIG_DIR), "--config-name", "cpu", folders)


def _ours(mini_batch_pipeline: bool, one_step_off_policy: bool) -> tuple[str, ...]:
    return (
        *("-m", "reward_loop.verl.main_ppo", "--config-name", "cpu"),
        f"trainer.v1.trainer_mode={PIPELINE_MODE}",
        f"trainer.v1.{PIPELINE_MODE}.mini_batch_pipeline={mini_batch_pipeline}",
        f"trainer.v1.{PIPELINE_MODE}.one_step_off_policy={one_step_off_policy}",
    )


def modes() -> dict[str, Mode]:
    """The modes by key, in the order in which they run."""
    return {
        "verl": Mode("verl, sync, as shipped (polls every 2.0 s)", _verl("-m", "verl.trainer.main_ppo")),
        "verl_fair": Mode(
            "verl, sync, polls every 0.05 s", _verl(str(HERE / "verl_short_poll.py")), ("POLL_INTERVAL=0.05",)
        ),
        "mini_batch": Mode("ours, mini-batch pipeline", _ours(True, False)),
        "off_policy": Mode("ours, one-step off-policy", _ours(False, True)),
        "both": Mode("ours, both overlaps", _ours(True, True)),
    }


@dataclass(frozen=True)
class Result:
    """A run's steps, without those that do not count."""

    rows: list[dict[str, float]]

    def median(self, *names: str) -> float:
        """Return the median over steps of the sum of some metrics; one that is not logged counts 0."""
        return statistics.median(sum(row.get(name, 0.0) for name in names) for row in self.rows)

    @property
    def seconds(self) -> float:
        """The length of a step, without the log and checkpoints around it."""
        return self.median("timing_s/step")

    @property
    def waiting_share(self) -> float:
        """The share of a step in which the trainer waited for rewards, where it can be told."""
        return self.median("reward_pipeline/waiting_share")

    @property
    def working(self) -> float:
        """T: all that the trainer does with a batch once it is generated and judged."""
        parts = ("old_log_prob", "adv", "update_actor", "update_weights")
        return self.median(*(f"timing_s/{part}" for part in parts))

    @property
    def reward(self) -> float:
        """The mean reward of the last three steps."""
        return statistics.fmean(row["critic/score/mean"] for row in self.rows[-3:])


def prepare(folder: Path) -> None:
    """Make the policy, two layers with random weights, and the prompts."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    build_tiny_model(folder / "policy", "generative")
    write_data(folder, prompts=2 * PROMPTS)


def run(mode: Mode, folder: Path, output: Path, steps: int, progress: Callable[[int], None]) -> Result:
    """Train for some steps on what is in ``folder``, in processes that are all gone afterwards.

    Raises:
        TrainingFailedError: it ended with an error; the end of its log is in the message.
    """
    output.mkdir()
    command = [
        *("env", *(f"{name}={value}" for name, value in CPU_ENVIRONMENT.items())),
        *(f"JUDGE_LATENCY={JUDGE}", f"JUDGE_CONCURRENCY={CONCURRENCY}", *mode.environment),
        *(sys.executable, *mode.command),
        f"actor_rollout_ref.model.path={folder / 'policy'}",
        f"actor_rollout_ref.rollout.n={RESPONSES}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        f"data.train_batch_size={PROMPTS}",
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
        "ray_kwargs.ray_init.num_cpus=13",
        "ray_kwargs.ray_init.num_gpus=1",
    ]
    log, metrics = output / "log", output / "metrics.jsonl"
    deadline = time.monotonic() + LONGEST_RUN_S
    with Training(command, log, metrics) as training:
        while (status := training.status()) is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            progress(len(_rows(metrics)))
    rows = _rows(metrics)
    if status != 0 or len(rows) != steps:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL:])
        raise TrainingFailedError(
            f"{tail}\n\n{mode.name}: ended with status {status} after {len(rows)} of {steps} steps"
        )
    return Result(rows[WARM_UP:])


def _rows(metrics: Path) -> list[dict[str, float]]:
    """The metrics of each step so far, without a line that is being written."""
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines(keepends=True)
    return [json.loads(line)["data"] for line in lines if line.endswith("\n")]
