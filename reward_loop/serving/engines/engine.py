"""What the manager must know about a program that serves models."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from reward_loop.config import ServedModelConfig
from reward_loop.errors import ConfigError

__all__ = ["Engine", "flags", "normalised"]


class Engine(ABC):
    """One kind of server.

    The configurations that it gets are settled: `kind` is not ``auto``, and `served_model_name` is given.
    """

    health_path: ClassVar[str] = "/health"
    """A GET of it is answered with a status below 400 by a server that is ready."""

    inherits_socket: ClassVar[bool] = False
    """Whether it takes the options ``--fd`` and ``--lifeline-fd`` of our own servers."""

    sleep_path: ClassVar[str | None] = None
    """A POST of ``{}`` to it frees the memory that the model takes; ``None`` where there is nothing to free."""

    wake_path: ClassVar[str | None] = None
    """A POST of ``{}`` to it takes the memory again."""

    @abstractmethod
    def check(self, model: ServedModelConfig) -> None:
        """Looks for options that this engine does not have, before anything is started.

        Raises:
            ConfigError: an option makes no sense here, or the engine is not installed.
        """

    @abstractmethod
    def command(self, model: ServedModelConfig, host: str, port: int) -> list[str]:
        """The command line of one server.

        Args:
            model: what it serves.
            host, port: where it listens; for one that inherits its socket, they are known already.
        """

    @abstractmethod
    def environment(self, model: ServedModelConfig) -> dict[str, str]:
        """Environment variables, those of the user last."""

    def gpus(self, model: ServedModelConfig) -> int:
        """How many GPUs one server takes."""
        return 0


def normalised(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """`engine_args` with each option in one spelling: ``max_num_seqs`` for ``max-num-seqs`` and ``--max-num-seqs``."""
    return {str(name).lstrip("-").replace("-", "_"): value for name, value in engine_args.items()}


def flags(model: ServedModelConfig, options: Mapping[str, Any], reserved: frozenset[str]) -> list[str]:
    """Command-line options: ``options``, overridden by the user's `engine_args`.

    ``max_num_seqs: 64`` becomes ``--max-num-seqs 64``; see :class:`ServedModelConfig`.

    Raises:
        ConfigError: `engine_args` has an option that the manager sets itself.
    """
    own = normalised(model.engine_args)
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
