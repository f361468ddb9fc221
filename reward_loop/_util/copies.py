"""Copies of arguments: what one call of the user's code changes, no other call sees."""

from __future__ import annotations

import copy
from typing import Any

_SHARED = frozenset((type(None), bool, int, float, str, bytes))


def own_copy(value: Any) -> Any:
    """Return a value that shares nothing mutable with the given one.

    Numbers, texts and tuples of them are shared, and so is an object that cannot be copied, such as a lock.

    Raises:
        RecursionError: the value is nested too deeply, or contains itself.
    """
    kind = type(value)
    if kind in _SHARED:
        return value
    # By hand, because `copy.deepcopy` takes several times as long, for each sample.
    if kind is dict:
        if _SHARED.issuperset(map(type, value.values())):
            return value.copy()
        return {key: own_copy(item) for key, item in value.items()}
    if kind is list:
        return value.copy() if _SHARED.issuperset(map(type, value)) else [own_copy(item) for item in value]
    if kind is tuple:
        copied = tuple(map(own_copy, value))
        return copied if any(one is not other for one, other in zip(copied, value, strict=True)) else value
    if kind is frozenset:  # its items are hashable
        return value
    try:
        return copy.deepcopy(value)
    except RecursionError:
        raise
    except Exception:
        return value
