"""Runs of verl's own trainer on a CPU, in a process of its own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from reward_loop.verl.installed import SUPPORTED, installed_version
from tests.support.fork_server import module_environment, run_forked, worker_python
from tests.support.local_ray import printed_since, ray_address, stop_ray

RUNNING_RAY = (
    "ray_kwargs.ray_init.address=auto",
    *(f"ray_kwargs.ray_init.{name}=null" for name in ("num_cpus", "num_gpus", "object_store_memory")),
)
"""The options of a run that joins a running Ray."""

PIPELINE = "trainer.v1.trainer_mode=reward_pipeline"


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

    def figures(self, step: int, prefix: str) -> dict[str, Any]:
        """The metrics of a step whose names have this prefix, without it."""
        return {name.removeprefix(prefix): v for name, v in self.steps[step].items() if name.startswith(prefix)}

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


def write_data(directory: Path, prompts: int = 16, validation: int = 8, agents: Sequence[str] = ()) -> None:
    """Makes a data set in verl's format. Its prompts have these agent loops in turn, if any."""
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
        for i, row in enumerate(rows if agents else ()):
            row["agent_name"] = agents[i % len(agents)]
        pd.DataFrame(rows).to_parquet(directory / f"{split}.parquet")


def train(
    directory: Path,
    policy: Path,
    *overrides: str,
    function: str,
    reward_loop: bool = True,
    environment: Mapping[str, str] | None = None,
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
        environment: more environment variables, as of :func:`tests.verl.minibatches.recording`.
        own_ray: whether the command starts a Ray of its own, as users' commands do. By default, it joins the Ray of
            `tests.support.local_ray`.
        returncode: the exit status that is expected; ``None`` if a signal kills the command.

    Raises:
        AssertionError: the run ended with another exit status.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "train.parquet").exists():
        write_data(directory)
    module = [
        "examples.verl_cpu",
        *([] if installed_version() == SUPPORTED else ["+reward_loop.untested_verl=True"]),
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
        *([] if own_ray else RUNNING_RAY),
        f"+ray_kwargs.ray_init.runtime_env.py_executable={worker_python()!r}",
        *overrides,
    ]
    given = {
        "REWARD_LOG": str(directory / "calls.jsonl"),
        "VERL_FILE_LOGGER_PATH": str(directory / "metrics.jsonl"),
        **module_environment(),
        **(environment or {}),
    }
    environment = {**os.environ, **given}
    if not own_ray:  # a running Ray does not have the environment of the command
        module += [f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}='{value}'" for name, value in given.items()]
        environment["RAY_ADDRESS"] = ray_address()
    log, began = directory / "output.log", time.time()
    status = run_forked(module, environment, directory, log)
    output = log.read_text(errors="replace")
    if not own_ray:
        output = printed_since(began) + output
    if status != returncode:
        stop_ray()
        raise AssertionError(f"the exit status is {status}:\n{output[-8000:]}")
    return Run(returncode, output, directory)
