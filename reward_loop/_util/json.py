"""Strict JSON out of whatever users return."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import orjson

__all__ = ["encode", "to_json"]

_MAX_BITS = 14_000
"""Of an integer, about 4,200 digits: Python neither writes nor reads more than 4,300 as decimals."""

_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def encode(value: Any) -> bytes:
    """Encode as `to_json` does, quickly where the value lets us."""
    try:
        return orjson.dumps(value, default=_known, option=_OPTIONS)
    except TypeError:  # a lone surrogate, an integer beyond 64 bits, a key of some other type
        return to_json(value)


def to_json(value: Any) -> bytes:
    """Encode as one line of strict UTF-8 JSON: arrays become lists, NaN and infinities null, the unknown its text.

    An integer of more than 4,200 digits becomes text as well, hexadecimal.
    """
    # A lone surrogate has no UTF-8; backslashreplace writes it as the JSON escape that it came from.
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return hex(value)
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
    """Turn what JSON does not know into what it knows."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return list(value)
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value)
