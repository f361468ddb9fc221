"""What an inference engine is: the interface, its command-line options, and the Python interpreter that runs it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from reward_loop._util.text import shorten
from reward_loop.errors import ConfigError
from reward_loop.serving.options import ServedModelConfig

__all__ = [
    "STANDARD_ENVIRONMENT",
    "Engine",
    "flags",
    "has_module",
    "interpreter",
    "normalised",
    "origin",
    "version",
]

STANDARD_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    # torchrun and accelerate set it to "True" for their ranks. An engine that inherits it waits for a rendezvous store
    # that no process serves, and never starts.
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}
"""Environment variables for vLLM and SGLang."""

_GPU_COUNTS = frozenset(
    {
        *("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"),
        *("tp_size", "dp_size", "pp_size", "tp", "dp", "pp"),
    }
)
"""Options of the engines that change the number of GPUs. In `engine_args`, they would change it after the GPUs of the
server were reserved."""

_ANSWERS_WITHIN_S = 120.0
"""Seconds that an interpreter may take to start: from a network file system, this can be long."""


class Engine(ABC):
    """An inference engine: its command line and options.

    A server that is ready answers ``GET /health`` with a status below 400.
    The methods receive resolved configurations: `kind` is not ``auto``, and `served_model_name` is set.
    """

    inherits_socket: ClassVar[bool] = False
    """Whether the server accepts ``--fd`` and ``--parent-pipe``, as this library's own servers do."""

    def check(self, model: ServedModelConfig) -> None:
        """Check the options of a model before any server starts.

        Raises:
            ConfigError: an option is not valid for this engine, or the engine is not installed.
        """
        self.command(model, "", 0)

    @abstractmethod
    def command(self, model: ServedModelConfig, host: str, port: int) -> list[str]:
        """Return the command line of one server.

        Args:
            model: the configuration of its model.
            host, port: the address to listen on. Engines with `inherits_socket` may ignore them.

        Raises:
            ConfigError: see :meth:`check`.
        """

    @abstractmethod
    def environment(self, model: ServedModelConfig) -> dict[str, str]:
        """Return the server's environment variables. The user's `env` overrides those of the engine."""

    def gpus(self, model: ServedModelConfig) -> int:
        """Return the number of GPUs of one server."""
        return 0


def normalised(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return `engine_args` with one spelling of each option: ``--max-num-seqs`` becomes ``max_num_seqs``."""
    return {str(name).lstrip("-").replace("-", "_"): value for name, value in engine_args.items()}


def flags(model: ServedModelConfig, options: Mapping[str, Any], reserved: frozenset[str]) -> list[str]:
    """Return the server's command-line options: ``options``, overridden by the user's `engine_args`.

    ``max_num_seqs: 64`` becomes ``--max-num-seqs 64``. ``True`` becomes the flag alone, a dict becomes JSON, and
    ``False`` and ``None`` omit the option. See :class:`ServedModelConfig`.

    Args:
        model: the configuration with `engine_args`.
        options: the options that reward_loop sets.
        reserved: names of options that the user must not set.

    Raises:
        ConfigError: `engine_args` sets a reserved option, or changes the number of GPUs.
    """
    own = normalised(model.engine_args)
    for name in sorted(_GPU_COUNTS & own.keys()):
        raise ConfigError(
            f"engine_args.{name}: set tensor_parallel_size or data_parallel_size of the model instead: they also "
            "determine how many GPUs a server gets. Pipeline parallelism is not supported"
        )
    for name in sorted(reserved & own.keys()):
        raise ConfigError(f"engine_args.{name}: is set by reward_loop, from its own options")
    line: list[str] = []
    for name, value in (dict(options) | own).items():
        if value is None or value is False:
            continue
        line.append("--" + name.replace("_", "-"))
        if value is not True:
            line += _words(value)
    return line


def _words(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [json.dumps(value)]
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    return [str(value)]


def interpreter(model: ServedModelConfig) -> str:
    """Return the path of the Python interpreter that runs the engine."""
    return model.python or sys.executable


def origin(model: ServedModelConfig) -> str:
    """Return the words for that interpreter in error messages."""
    return f"python={model.python!r}" if model.python else "this Python"


def has_module(name: str, model: ServedModelConfig) -> bool:
    """Return whether the interpreter finds a module. The module is not imported.

    Raises:
        ConfigError: the interpreter does not exist or does not work.
    """
    return bool(_value(f"importlib.util.find_spec({name!r}) is not None", model))


def version(distribution: str, model: ServedModelConfig) -> str | None:
    """Return the version of a distribution that the interpreter has, or ``None`` if it has none.

    Raises:
        ConfigError: the interpreter does not exist or does not work.
    """
    found = f"importlib.metadata.distributions(name={distribution!r})"
    installed: str | None = _value(f"next((distribution.version for distribution in {found}), None)", model)
    return installed


def _value(expression: str, model: ServedModelConfig) -> Any:
    return _value_in(interpreter(model), frozenset(model.env.items()), expression)


@functools.cache
def _value_in(python: str, env: frozenset[tuple[str, str]], expression: str) -> Any:
    """Return the value of an expression in an interpreter. Errors are not cached: the user may fix the cause."""
    program = f"import importlib.metadata, importlib.util, json; print(json.dumps({expression}))"
    try:
        done = subprocess.run(
            [python, "-c", program],
            env={**os.environ, **dict(env)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWERS_WITHIN_S,
            check=False,
        )
    except OSError as error:
        raise ConfigError(
            f"python={python!r}: the interpreter cannot be started: {error.strerror or error}. Set the path of the "
            "Python of the environment that has the engine"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"python={python!r}: no answer within {_ANSWERS_WITHIN_S:g} s") from None
    try:
        if not done.returncode:
            return json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        pass
    said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
    raise ConfigError(
        f"python={python!r}: not a working Python interpreter: exit status {done.returncode}, {shorten(said)}"
    )
