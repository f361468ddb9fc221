"""What managers make of a user's function and of the options: the scoring function, and the writer of records."""

from __future__ import annotations

from typing import Any

from reward_loop.errors import ConfigError
from reward_loop.limits.permit import DEFAULT, Limits
from reward_loop.managers.options import RewardLoopConfig
from reward_loop.records import Records, records
from reward_loop.scoring import ScoringFunction

_SHARED = ("limits", "budget", "max_failed_share", "min_samples_for_failed_share", "failed_share_window")
"""The options that managers must have in common to share limits."""


def scoring_function(
    manager: type, function: Any, options: RewardLoopConfig, *, limits: Limits | None = None, **more: Any
) -> Any:
    """Return the scoring function for a manager class: for single samples or for batches, by its ``function_type``.

    Args:
        manager: the manager class.
        function: the user's function, or a scoring function, which is returned unchanged.
        options: the options of the scoring function.
        limits: the limits that the scoring function shares. A scoring function passed as ``function`` keeps its own.
        more: further arguments of the scoring function: ``reward_kwargs`` and ``limit``.

    Raises:
        FunctionLoadError: the function requires an argument that the reward loop does not provide.
        ConfigError: ``more`` is given, but ``function`` is already a scoring function, so it would have no effect.
    """
    kind = getattr(manager, "function_type", ScoringFunction)
    if isinstance(function, kind):
        if ignored := sorted(name for name, value in more.items() if value and (name, value) != ("limit", DEFAULT)):
            raise ConfigError(
                f"{ignored[0]}={more[ignored[0]]!r} has no effect: {function.name} is a {kind.__name__} already; pass "
                f"{ignored[0]} to its constructor"
            )
        return function
    return kind(function, options=options, limits=limits, **more)


def limits_of(function: Any, options: RewardLoopConfig) -> Limits | None:
    """Return the limits of a scoring function if their options equal ``options``, otherwise ``None``."""
    limits: Limits | None = getattr(function, "limits", None)
    if not isinstance(limits, Limits):
        return None
    same = all(getattr(limits.options, name) == getattr(options, name) for name in _SHARED)
    return limits if same else None


def open_records(options: RewardLoopConfig) -> Records | None:
    """Return this process's writer for ``log_dir``; ``None`` if it is not set."""
    return records(options.log_dir, options.record.max_bytes) if options.log_dir else None
