"""The reward workers of a run as the current scorer of its other processes.

An agent loop of verl runs in an agent loop worker, which knows the reward workers. The code of an environment may run
elsewhere: in a Ray task, or in an actor of the user's agent loop manager. There, the reward workers are found by their
names in Ray. Each run has its own names, since a run in the same Ray job may have ended just before: the id of the run
is in the environment of its task runner, and so, by Ray's inheritance, of all tasks and actors that it starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import GetTimeoutError

from reward_loop.agent.environment import CurrentScorer
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.verl.reward_client import RewardClient

ANSWER_S = 120.0
"""Timeout in seconds for the options of the run. A worker whose event loop is blocked does not answer."""

RUN_VARIABLE = "REWARD_LOOP_RUN"
"""The environment variable with the id of the run."""


class InNewRun:
    """A task runner class each of whose actors is a new run. Has what verl uses of an actor class.

    Args:
        task_runner: a Ray actor class. A ``runtime_env`` of its decorator has no effect.
    """

    def __init__(self, task_runner: Any) -> None:
        self._task_runner = task_runner

    def options(self, *, runtime_env: Mapping[str, Any] | None = None, **more: Any) -> Any:
        """Return the class with these options of Ray."""
        given = dict(runtime_env or {})
        variables = {**given.pop("env_vars", {}), RUN_VARIABLE: uuid4().hex}
        return self._task_runner.options(runtime_env={**given, "env_vars": variables}, **more)

    def remote(self, *arguments: Any) -> Any:
        """Start the actor."""
        return self.options().remote(*arguments)


def worker_name(position: int) -> dict[str, str]:
    """Return the options of Ray with the name of a reward worker. Each run has its own names."""
    return {"name": f"reward_worker_{position}", "namespace": _namespace()}


@contextmanager
def scorer_of_run(**rollout: Any) -> Iterator[None]:
    """Make the run's reward workers the current scorer within the block, in a Ray task or actor of the run.

    Example::

        with scorer_of_run(uid=f"{uid}_{session}", group=uid):
            reward = await reward_loop.score(answer, ground_truth=truth)

    Blocks until Ray has found the workers: enter it once for many samples.

    Args:
        rollout: the fields of the samples that the environment's code does not give itself, such as ``group``.

    Raises:
        ConfigError: the run has no reward workers.
        RewardLoopError: the first worker did not answer within `ANSWER_S` seconds.
    """
    namespace = _namespace()
    names = [
        actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == namespace
    ]
    if not names:
        raise ConfigError(
            "the run has no reward workers: call scorer_of_run in a task or actor of a run with "
            "reward_model.use_reward_loop=True, after its trainer has started them"
        )
    # In the order of the trainer: with `by_group`, all processes must choose the same worker for a prompt.
    workers = [ray.get_actor(name, namespace) for name in sorted(names, key=lambda name: int(name.rsplit("_", 1)[1]))]
    asked = [workers[0].run_options.remote(), workers[0].needs_group.remote()]
    try:
        options, needs_group = ray.get(asked, timeout=ANSWER_S)
    except GetTimeoutError as error:
        raise RewardLoopError(
            f"a reward worker did not answer within {ANSWER_S:g} s: does the reward function block the event loop?"
        ) from error
    client = RewardClient(workers, options)
    client.by_group = needs_group
    with CurrentScorer(client.compute_score.remote, rollout).in_use():
        yield


def _namespace() -> str:
    # A recipe that calls verl's `run_ppo` itself has one run in a Ray job.
    return f"reward_loop_{os.environ.get(RUN_VARIABLE) or ray.get_runtime_context().get_job_id()}"
