"""Reward functions that log their argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def logging_function(name: str, seen: list[Any], default: str = "") -> Callable[..., float]:
    """Return a function whose one parameter has this name. It appends the argument to ``seen``, and returns 1.

    ``default`` is the source of the parameter's default, such as ``=7``.
    """
    function: Callable[..., float] = eval(f"lambda {name}{default}: seen.append({name}) or 1.0", {"seen": seen})
    return function
