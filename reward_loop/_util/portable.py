"""Values that every process of a run can read, and every file can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from enum import Enum
from numbers import Real
from typing import Any

__all__ = ["portable"]

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))

_KNOWN = frozenset(("datetime", "decimal", "fractions", "numpy", "torch", "uuid"))
"""The modules whose values stay as they are: each process of a run has them."""


def portable(value: Any) -> Any:
    """Return a value without objects of classes that only its function's module has.

    Members of an enumeration become their values, dataclasses and mappings dicts with texts as keys, other containers
    lists, numbers floats, and all other objects their text.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Enum):
        return portable(value.value)
    if kind.__module__.partition(".")[0] in _KNOWN:
        return portable(value.tolist()) if getattr(value, "dtype", None) == "O" else value
    if isinstance(value, Mapping):
        return {str(key): portable(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: portable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if kind is tuple:
        return tuple(map(portable, value))
    if isinstance(value, list | tuple | Set):
        return list(map(portable, value))
    return float(value) if isinstance(value, Real) else str(value)
