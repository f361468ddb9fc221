"""Checks which engine a Python interpreter has: the one of this process, or the one of the option `python`."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from reward_loop._util.text import shorten
from reward_loop.config import ServedModelConfig
from reward_loop.errors import ConfigError

__all__ = ["absolute", "has_module", "interpreter", "origin", "version"]

_ANSWERS_WITHIN_S = 120.0
"""Seconds that an interpreter may take to start: from a network file system, this can be long."""


def absolute(python: str) -> str:
    """Returns the absolute path of an interpreter. A name without a ``/`` is returned as it is, and looked up in PATH.

    Symbolic links are not followed: the interpreter of a virtual environment is one.
    """
    return str(Path(python).expanduser().absolute()) if os.sep in python else python


def interpreter(model: ServedModelConfig) -> str:
    """Returns the path of the Python interpreter that runs the engine."""
    return model.python or sys.executable


def origin(model: ServedModelConfig) -> str:
    """Returns the words for that interpreter in error messages."""
    return f"python={model.python!r}" if model.python else "this Python"


def has_module(name: str, model: ServedModelConfig) -> bool:
    """Returns whether the interpreter finds a module. The module is not imported.

    Raises:
        ConfigError: the interpreter of the option `python` does not exist or does not work.
    """
    if model.python is None:
        return importlib.util.find_spec(name) is not None
    return bool(_value(f"importlib.util.find_spec({name!r}) is not None", model.python, frozenset(model.env.items())))


def version(distribution: str, model: ServedModelConfig) -> str | None:
    """Returns the version of a distribution that the interpreter has, or ``None`` if it has none.

    Raises:
        ConfigError: the interpreter of the option `python` does not exist or does not work.
    """
    if model.python is None:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None
    found = f"importlib.metadata.distributions(name={distribution!r})"
    expression = f"next((distribution.version for distribution in {found}), None)"
    return _value(expression, model.python, frozenset(model.env.items()))


@functools.cache
def _value(expression: str, python: str, env: frozenset[tuple[str, str]]) -> Any:
    """Returns the value of an expression in another interpreter. Errors are not cached: the user may fix the cause."""
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
