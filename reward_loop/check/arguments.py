"""Finds out which of its arguments a reward function changes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

from reward_loop.scoring.signature import Target

__all__ = ["watch_arguments"]


def watch_arguments(target: Target) -> tuple[Callable[..., Any], set[str]]:
    """Return a function that calls the target, and the names of the arguments that the target has changed so far."""
    changed: set[str] = set()

    @contextlib.contextmanager
    def watched(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
        passed = {name: value for name, value in given.items() if name in target.passes} | dict(target.reward_kwargs)
        copies = {}
        for name, value in passed.items():
            with contextlib.suppress(Exception):  # values that cannot be copied (a lock, a model) are not compared
                copies[name] = copy.deepcopy(value)
        try:
            yield passed
        finally:
            changed.update(name for name, value in copies.items() if repr(value) != repr(passed[name]))

    async def call_async(**arguments: Any) -> Any:
        with watched(arguments) as passed:
            return await target.call(**passed)

    def call(**arguments: Any) -> Any:
        with watched(arguments) as passed:
            return target.call(**passed)

    return (call_async if target.is_async else call), changed
