"""Runs of verl's own trainer on a CPU, in a process of its own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from reward_loop.verl.cpu.preload import MODULES, preloaded, set_environment
from reward_loop.verl.main_ppo import CPU_ENVIRONMENT
from tests.nodes import Node
from tests.verl.shared_ray import shared_ray, stop_shared_ray

REPOSITORY = Path(__file__).parents[2]

RAY_ENVIRONMENT = {"RAY_prestart_worker_first_driver": "0"}
"""Workers that Ray starts before it receives a task have no environment of the run, so they are not used."""

TIMEOUT_S = 600
"""A run takes less than a minute on two quiet cores. Two runs fit into the time limit of an integration test."""


def module_environment(verl: Path | None = None) -> dict[str, str]:
    """The environment variables of a run that are read when modules are imported.

    Args:
        verl: a folder with another release of verl, which comes before the installed one.
    """
    # Ray's workers import the agent loops from the repository. It comes first, because verl 0.9.0 also has a `tests`.
    path = (REPOSITORY, verl, os.environ.get("PYTHONPATH"))
    return {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(str(folder) for folder in path if folder)}


def agent_loop(name: str) -> tuple[str, ...]:
    """The overrides that choose one of the agent loops in loops.yaml."""
    agent = "actor_rollout_ref.rollout.agent"
    path = Path(__file__).with_name("loops.yaml")
    return (f"{agent}.agent_loop_config_path={path}", f"{agent}.default_agent_loop={name}")


@dataclass
class Run:
    """What a run left behind."""

    returncode: int
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
        """The rollouts of a training step as verl saw them after the update."""
        return json_lines(self.directory / "rollouts" / f"{step}.jsonl")

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
    entry: Sequence[str] = ("reward_loop.verl.main_ppo", "--config-name", "cpu"),
    verl: Path | None = None,
    environment: Mapping[str, str] | None = None,
    node: Node | None = None,
    python: str | None = None,
    own_ray: bool = False,
    returncode: int = 0,
) -> Run:
    """Trains ``policy`` for some steps with the function ``rewards.py:function``; waits for the end.

    Args:
        directory: receives what the run writes.
        policy: the directory of the model.
        *overrides: options, as on the command line.
        function: the name of the reward function in ``rewards.py``.
        entry: the module of the command that trains, and its first arguments.
        verl: a folder with another release of verl.
        environment: more environment variables, as of :func:`tests.verl.minibatches.recording`.
        node: the node of a running Ray cluster on which the command runs.
        python: Ray's ``py_executable``; by default that of :func:`worker_python`.
        own_ray: whether the command starts a Ray of its own. By default, it joins the one of `shared_ray`.
        returncode: the exit status that is expected.

    Raises:
        AssertionError: the run ended with another exit status.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "train.parquet").exists():
        write_data(directory)
    command = [
        *(sys.executable, "-m", *entry),
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
        status = _spawn(node.command(*command, directory=directory), environment, directory, log)
    else:
        if not own_ray:
            platform = {name: value for name, value in CPU_ENVIRONMENT.items() if name not in os.environ}
            environment["RAY_ADDRESS"] = shared_ray({**platform, **module_environment(), **RAY_ENVIRONMENT})
        status = _fork(command[2:], environment, directory, log)
    output = _text(log)
    if status != returncode:
        stop_shared_ray()
        raise AssertionError(f"the exit status is {status}:\n{output[-8000:]}")
    return Run(status, output, directory)


def _spawn(command: list[str], environment: Mapping[str, str], directory: Path, log: Path) -> int:
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
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _fork(arguments: list[str], environment: Mapping[str, str], directory: Path, log: Path) -> int:
    """Runs ``python -m`` with these arguments. The file ``trainer`` in the directory has the id of the process."""
    process = _trainers().Process(target=_main, args=(arguments, environment, directory, log))
    process.start()
    (directory / "trainer").write_text(str(process.pid))
    try:
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            raise AssertionError(f"the run did not end within {TIMEOUT_S} s:\n{_text(log)[-5000:]}")
        return process.exitcode
    finally:
        if process.exitcode is None and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


@functools.cache
def _trainers() -> ForkServerContext:
    """Forks trainers from a process with preloaded modules: importing them takes a trainer some 10 s of CPU time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))
    with _modules_environment():
        ensure_running()
    return context


def _main(arguments: list[str], environment: Mapping[str, str], directory: Path, log: Path) -> None:
    """Runs ``python -m`` with these arguments as the leader of a session, with its output in a file."""
    os.setsid()
    with log.open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    set_environment(environment)
    os.chdir(directory)
    module, *sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


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
    """Ray's ``py_executable`` for all runs and clusters of this process: it forks workers from a fork server.

    By default, each run starts a fork server of its own, which takes some 10 s of CPU time.
    """
    with _modules_environment():
        return _open.enter_context(preloaded())
