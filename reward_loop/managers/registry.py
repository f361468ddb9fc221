"""The registry of reward managers, by name or import path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from reward_loop._util.text import did_you_mean, listing
from reward_loop.errors import ConfigError, FunctionLoadError
from reward_loop.managers.options import RewardLoopConfig
from reward_loop.scoring.load import load_object

C = TypeVar("C", bound=type)

_managers: dict[str, type] = {}

OPTIONS: dict[str, dict[str, Any]] = {
    "remote": {"isolation": "process"},
    "prime": {"isolation": "process"},
    "rate_limited": {"limits": {"default": {"max_concurrent": 1}}},
}
"""Names of verl's managers that stand for `naive` with these options, where others are not given."""


_ENDED = {
    "composite": "combine the functions in Python, reward_loop.combine(form=(form, 0.2), truth=(truth, 1))",
    "gdpo": "verl's V1 trainer passes only the sum of a sample's rewards to GDPO: use `naive` with a function that "
    "combines its rewards",
    "limited": "use `naive` with reward_loop.limits.default (-O limits.default.max_concurrent=... on the command line)",
}
"""Names that are refused, and what to use instead."""


def register(name: str) -> Callable[[C], C]:
    """Return a decorator that registers a manager class under a name.

    Args:
        name: the name; non-empty and without a colon.

    Raises:
        ConfigError: the name is invalid, or another class is registered under it.

    Example::

        @register("my_manager")
        class MyManager(RewardLoopManagerBase): ...
    """
    if not name or ":" in name:
        raise ConfigError(f"invalid manager name {name!r}: it must be non-empty and contain no ':'")

    def decorate(cls: C) -> C:
        known = _managers.get(name)
        # A file that is imported twice, perhaps under another module name, defines the same class again.
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise ConfigError(f"the reward manager {name!r} is registered already: {known.__module__}.{known.__name__}")
        _managers[name] = cls
        return cls

    return decorate


def get(name: str) -> type[Any]:
    """Return a manager class by its registered name, or by import path.

    Args:
        name: a registered name, ``package.module:Class`` or ``file.py:Class``.

    Raises:
        ConfigError: the name is unknown or refused, the import fails, or the object is not a manager class.
    """
    if name in _managers:
        return _managers[name]
    if name in OPTIONS:
        return _managers["naive"]
    if name in _ENDED:
        raise ConfigError(f"there is no reward manager {name!r}: {_ENDED[name]}")
    if ":" not in name:
        raise ConfigError(
            f"unknown reward manager {name!r}{did_you_mean(name, names()) or '.'} Known: {listing(names())}; "
            "others are named by import path, `package.module:Class` or `file.py:Class`"
        )
    try:
        found = load_object(name)
    except FunctionLoadError as error:
        raise ConfigError(f"reward manager {name!r}: {error}") from error
    if not isinstance(found, type) or not callable(getattr(found, "run_single", None)):
        raise ConfigError(f"{name} is not a reward manager: it must be a class with an async method `run_single`")
    return found


def names() -> list[str]:
    """Return the names that `get` knows, sorted."""
    return sorted({*_managers, *OPTIONS})


def is_known(name: str) -> bool:
    """Return whether `get` knows a name, or refuses it with a reason. Others may be names of verl's managers."""
    return name in _managers or name in OPTIONS or name in _ENDED


def with_options_of(name: str, options: RewardLoopConfig) -> RewardLoopConfig:
    """Return the options of a run with those that the name of its manager stands for."""
    added = OPTIONS.get(name, {})
    given = {field: getattr(options, field) for field in options.model_fields_set}
    if "limits" in added:
        given["limits"] = added["limits"] | options.limits
    return RewardLoopConfig(**added | given) if added else options
