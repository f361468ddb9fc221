"""Reads one line of a file of records."""

from __future__ import annotations

import json
from typing import Any

import orjson

__all__ = ["parse_line"]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line; ``None`` if the line is incomplete."""
    if not line.endswith(b"\n"):
        return None
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            return None
    return found if isinstance(found, dict) else None
