"""Strict JSON out of whatever users return."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["to_json"]


def to_json(value: Any) -> bytes:
    """Encode as one line of strict UTF-8 JSON: arrays become lists, NaN and infinities null, the unknown its text."""
    # A lone surrogate has no UTF-8; backslashreplace writes it as the JSON escape that it came from.
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if callable(getattr(value, "tolist", None)):
        return _plain(value.tolist())
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value)
