"""Runs of verl's own trainer on a CPU, in a process of its own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from examples.nodes import Node
from reward_loop.verl.cpu.preload import preloaded
from reward_loop.verl.cpu.setup import CPU_ENVIRONMENT
from tests.local_ray import RAY_ENVIRONMENT, module_environment, ray_address, stop_ray

FORKED = Path(__file__).with_name("forked_trainer.py")

PIPELINE = "trainer.v1.trainer_mode=reward_pipeline"

TIMEOUT_S = 600
"""A run takes less than a minute on two quiet cores. Two runs fit into the time limit of an integration test."""


def agent_loop(name: str) -> tuple[str, ...]:
    """The overrides that choose one of the agent loops in loops.yaml."""
    agent = "actor_rollout_ref.rollout.agent"
    path = Path(__file__).with_name("loops.yaml")
    return (f"{agent}.agent_loop_config_path={path}", f"{agent}.default_agent_loop={name}")


@dataclass
class Run:
    """What a run left behind."""

    returncode: int | None
    output: str
    directory: Path

    @property
    def steps(self) -> dict[int, dict[str, Any]]:
        """The logged metrics by step; step 0 is the validation before training."""
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        steps: dict[int, dict[str, Any]] = {}
        for line in map(json.loads, lines):
            steps.setdefault(line["step"], {}).update(line["data"])
        return steps

    @property
    def calls(self) -> list[dict[str, Any]]:
        """What the reward function wrote, in the order of its calls."""
        return json_lines(self.directory / "calls.jsonl")

    @property
    def generations(self) -> list[dict[str, float]]:
        """What the agent loop `timed` wrote."""
        return json_lines(self.directory / "generations.jsonl")

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """The rollouts of a training step as verl saw them after the update, without verl's padding."""
        rows = json_lines(self.directory / "rollouts" / f"{step}.jsonl")
        return [row for row in rows if not row["uid"].startswith("pad")]

    def validation(self, step: int) -> list[dict[str, Any]]:
        """The rollouts of a validation."""
        return json_lines(self.directory / "validation" / f"{step}.jsonl")


def json_lines(path: Path) -> list[dict[str, Any]]:
    # Not `splitlines`: a text may have characters that it takes for the end of a line.
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def write_data(directory: Path, prompts: int = 16, validation: int = 8) -> None:
    """Makes a data set in verl's format."""
    for split, count, first in (("train", prompts, 0), ("val", validation, 1000)):
        rows = [
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"{i}+{i + 1}="}],
                "reward_model": {"style": "rule", "ground_truth": str(2 * i + 1)},
                "extra_info": {"index": i, "split": split},
            }
            for i in range(first, first + count)
        ]
        pd.DataFrame(rows).to_parquet(directory / f"{split}.parquet")


def train(
    directory: Path,
    policy: Path,
    *overrides: str,
    function: str,
    reward_loop: bool = True,
    verl: Path | None = None,
    environment: Mapping[str, str] | None = None,
    node: Node | None = None,
    python: str | None = None,
    own_ray: bool = False,
    returncode: int | None = 0,
) -> Run:
    """Trains ``policy`` for some steps with the function ``rewards.py:function``; waits for the end.

    Args:
        directory: receives what the run writes.
        policy: the directory of the model.
        *overrides: options, as on the command line.
        function: the name of the reward function in ``rewards.py``.
        reward_loop: whether the reward loop is on, by the mode ``reward_pipeline`` or by its option.
        verl: a folder with another release of verl.
        environment: more environment variables, as of :func:`tests.verl.minibatches.recording`.
        node: the node of a running Ray cluster on which the command runs.
        python: Ray's ``py_executable``; by default that of :func:`worker_python`.
        own_ray: whether the command starts a Ray of its own. By default, it joins the one of `tests.local_ray`.
        returncode: the exit status that is expected; ``None`` if a signal kills the command.

    Raises:
        AssertionError: the run ended with another exit status.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "train.parquet").exists():
        write_data(directory)
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", "cpu"),
        *(["reward_model.use_reward_loop=True"] if reward_loop and PIPELINE not in overrides else []),
        f"actor_rollout_ref.model.path={policy}",
        f"data.train_files={directory}/train.parquet",
        f"data.val_files={directory}/val.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "data.max_response_length=12",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "algorithm.adv_estimator=grpo",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={directory}/checkpoints",
        f"trainer.rollout_data_dir={directory}/rollouts",
        f"trainer.validation_data_dir={directory}/validation",
        f"hydra.run.dir={directory}",
        f"custom_reward_function.path={Path(__file__).with_name('rewards.py')}",
        f"custom_reward_function.name={function}",
        f"+ray_kwargs.ray_init.runtime_env.py_executable={python or worker_python()!r}",
        *overrides,
    ]
    given = {
        "REWARD_LOG": str(directory / "calls.jsonl"),
        "VERL_FILE_LOGGER_PATH": str(directory / "metrics.jsonl"),
        **module_environment(verl),
        **(environment or {}),
    }
    environment = {**os.environ, **RAY_ENVIRONMENT, **given}
    if node is not None or not own_ray:
        # A running Ray does not have the environment of the command.
        command += [f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}='{value}'" for name, value in given.items()]
    log = directory / "output.log"
    if node is not None:
        status: int | None = _wait(node.command(*command, directory=directory), environment, directory, log)
    else:
        if not own_ray:
            environment["RAY_ADDRESS"] = ray_address()
        status = run_forked(command[2:], environment, directory, log)
    output = _text(log)
    if status != returncode:
        stop_ray()
        raise AssertionError(f"the exit status is {status}:\n{output[-8000:]}")
    return Run(returncode, output, directory)


def run_forked(module: Sequence[str], environment: Mapping[str, str], directory: Path, log: Path) -> int | None:
    """Runs ``python -m MODULE ARGUMENTS`` in a process of the fork server of `worker_python`, and waits for its end.

    Args:
        module: the name of the module, and its arguments.
        environment: all environment variables.
        directory: its current directory, of this process alone.
        log: receives its output.

    Returns:
        The exit status, or ``None`` if a signal killed the process.

    Raises:
        AssertionError: it did not end within `TIMEOUT_S`.
    """
    _wait([*shlex.split(worker_python()), str(FORKED), *module], environment, directory, log)
    ended = directory / "status"
    return int(ended.read_text()) if ended.exists() else None


def _wait(command: list[str], environment: Mapping[str, str], directory: Path, log: Path) -> int:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=directory, start_new_session=True
        )
    try:
        return process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the run did not end within {TIMEOUT_S} s:\n{_text(log)[-5000:]}") from None
    finally:
        if process.poll() is None:
            trainer = directory / "trainer"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(trainer.read_text()) if trainer.exists() else process.pid, signal.SIGKILL)
            process.kill()
            process.wait()


@contextlib.contextmanager
def _modules_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (CPU_ENVIRONMENT | module_environment()).items():
            patch.setenv(name, value)
        yield


def _text(path: Path) -> str:
    return path.read_text(errors="replace")


_open = contextlib.ExitStack()
atexit.register(_open.close)


@functools.cache
def worker_python() -> str:
    """The Python of all trainers, and of Ray's workers: it forks them from a process with preloaded modules.

    By default, each run starts a fork server of its own, which takes some 10 s of CPU time.
    """
    with _modules_environment():
        return _open.enter_context(preloaded())
