"""Values in nested data, by their dotted path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["MISSING", "look_up"]

MISSING = object()
"""What `look_up` returns for a value that does not exist."""


def look_up(data: Any, path: str) -> Any:
    """Return the value at a path through mappings and lists, such as ``messages.0.content``; `MISSING` without one.

    A key with dots, such as ``a.b``, has priority over a key ``b`` in the mapping ``a``.
    """
    value = data
    while not (isinstance(value, Mapping) and path in value):
        name, dot, path = path.partition(".")
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return MISSING
        if not dot:
            return value
    return value[path]
