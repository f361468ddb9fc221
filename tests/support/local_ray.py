"""One Ray on this machine for the tests of a process: each start of Ray takes some 15 s of CPU time."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.verl_cpu import ENVIRONMENT
from tests.support.clusters import started_cluster
from tests.support.fork_server import forking_python, module_environment, worker_python

NODE = {
    "num_cpus": 64,
    "num_gpus": 8,
    "object_store_memory": 2**28,
    # It takes a tenth of a core for as long as Ray runs; `printed_since` replaces it.
    "include_log_monitor": False,
    "setup_worker_path": str(Path(__file__).with_name("setup_worker.py")),
}
"""More CPUs and GPUs than any test asks for. Tests take turns."""

_open = ExitStack()
atexit.register(_open.close)


@functools.cache
def _cluster() -> Any:
    """Starts Ray if no test has yet. It stops with this process.

    Its workers have the environment of a run on a CPU, as far as it is read when verl is imported.
    """
    platform = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (platform | module_environment()).items():
            patch.setenv(name, value)
        return _open.enter_context(started_cluster(NODE))


def ray_address() -> str:
    """Starts Ray if no test has yet, and returns its address."""
    return str(_cluster().address)


def printed_since(time: float) -> str:
    """Returns the logs of the workers that have printed something since a time."""
    logs = sorted(Path(_cluster().head_node.get_logs_dir_path()).glob("worker-*"))
    return "".join(log.read_text(errors="replace") for log in logs if log.stat().st_mtime >= time)


def options_of_local_ray(folder: Path, **variables: object) -> list[str]:
    """The options with which verl's trainer uses this Ray and the fork server, whose starts take long.

    Args:
        folder: the current directory of the workers, as in a Ray that the trainer starts.
        **variables: their environment variables: a running Ray does not have those of the command.
    """
    options = {"address": ray_address(), "num_cpus": "null", "num_gpus": "null", "object_store_memory": "null"}
    python = f"env --chdir={folder} {worker_python()}"
    return [
        *(f"++ray_kwargs.ray_init.{name}={value}" for name, value in options.items()),
        f"+ray_kwargs.ray_init.runtime_env.py_executable={python!r}",
        *(f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}='{value}'" for name, value in variables.items()),
    ]


def in_local_ray(command: list[str], folder: Path, **variables: object) -> list[str]:
    """Changes a command with verl's trainer, so that it uses this Ray and the fork server.

    Args:
        command: the command, ``PYTHON -m MODULE OPTIONS``; before it, ``env NAME=VALUE ...`` if it has variables.
        folder: the current directory of the command, of no other.
        **variables: more environment variables of the training.
    """
    start = command.index(sys.executable)
    variables |= dict(word.split("=", 1) for word in command[1:start])
    python = str(forking_python(folder))
    return [*command[:start], python, *command[start + 1 :], *options_of_local_ray(folder, **variables)]


def stop_ray() -> None:
    """Stops it, so that the next test gets a new one."""
    _open.close()
    _cluster.cache_clear()


@contextmanager
def local_ray(**options: Any) -> Iterator[None]:
    """Connects to Ray, and stops everything that was started in it at the end. Workers are forked.

    Args:
        **options: of ``ray.init``.
    """
    import ray

    runtime_env = {"py_executable": worker_python(), **options.pop("runtime_env", {})}
    ray.init(ray_address(), runtime_env=runtime_env, **options)
    try:
        yield
    finally:
        ray.shutdown()
