"""Encodes records as lines of JSON that every reader accepts, without API keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from reward_loop._util.json import encode

__all__ = ["cleaned", "encode_record", "hide"]

MIN_LENGTH = 8
"""Shorter keys are not hidden: they are words such as ``EMPTY``, which occur in ordinary texts."""

_HIDDEN = b"[API key]"

_LONE_SURROGATE = re.compile(rb"(?<!\\)((?:\\\\)*)\\(u[dD][89a-fA-F][0-9a-fA-F]{2})")

_secrets: dict[str, re.Pattern[bytes]] = {}


def hide(secret: str) -> None:
    """Replace an API key in all records that this process encodes from now on.

    Headers are never recorded. But a server may repeat a key in an error message, and a function in its result.
    """
    if len(secret) >= MIN_LENGTH and secret not in _secrets:
        # A line may contain an error message that quotes the JSON of an answer: quotes are escaped several times.
        pattern = "".join(char if char.isalnum() else rf"\\*{re.escape(char)}" for char in secret)
        _secrets[secret] = re.compile(pattern.encode())


def encode_record(record: Mapping[str, Any]) -> bytes:
    """Return a record as JSON, without the keys passed to `hide`.

    Lone surrogates, which many readers reject, become text such as ``\\ud800``. If the record cannot be encoded, only
    its scalar fields are, and the field ``record_error`` says why.
    """
    try:
        line = encode(record)
    except Exception as error:  # a value whose str() raises, or a value that contains itself
        kept = {key: value for key, value in record.items() if isinstance(value, str | int | float | None)}
        line = encode({**kept, "record_error": f"{type(error).__name__}: {error}"})
    if b"\\ud" in line:
        line = _LONE_SURROGATE.sub(rb"\1\\\\\2", line)
    for pattern in tuple(_secrets.values()):  # other threads may add keys
        line = pattern.sub(_HIDDEN, line)
    return line


def cleaned(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as a reader of its line gets it: without API keys and lone surrogates."""
    read: dict[str, Any] = orjson.loads(encode_record(record))
    return read
