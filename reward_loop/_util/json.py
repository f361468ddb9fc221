"""Encode arbitrary Python values as strict JSON, and find values by their path."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

import orjson

__all__ = ["MISSING", "encode", "encode_fast", "look_up", "to_json"]

_MAX_BITS = 14_000
"""Integers up to this many bits (about 4,200 digits) are written in decimal. Python's own limit is 4,300 digits."""

_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def encode(value: Any) -> bytes:
    """Encode a value as `to_json` does, with orjson if orjson supports the value."""
    try:
        return encode_fast(value)
    except TypeError:
        return to_json(value)


def encode_fast(value: Any) -> bytes:
    """Encode a value with orjson.

    Raises:
        TypeError: it contains a lone surrogate, an integer beyond 64 bits, or a key of an unsupported type.
    """
    return orjson.dumps(value, default=_known, option=_OPTIONS)


def to_json(value: Any) -> bytes:
    """Encode a value as one line of strict UTF-8 JSON.

    Arrays become lists, NaN and infinities ``null``, bytes text, integers beyond the range of float text (of more than
    about 4,200 digits, hexadecimal), and values of unknown types their ``str()``.
    """
    # A lone surrogate cannot be encoded as UTF-8; backslashreplace writes it as a JSON escape.
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > sys.float_info.max:  # most readers refuse it as a number
        return str(value) if value.bit_length() <= _MAX_BITS else hex(value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _plain(_known(value))


def _known(value: Any) -> Any:
    """Convert a value of a type that JSON lacks to a similar value that can be encoded."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return list(value)
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value)


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
