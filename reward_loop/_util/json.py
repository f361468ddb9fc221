"""Encode arbitrary Python values as strict JSON, decode JSON exactly, and find values by their path; `portable`.

What a value is after it was written and read:

============================================== ==========================================
Written                                        Read
============================================== ==========================================
text, finite numbers, bools, ``None``          the same
NaN and infinities                             ``None``
bytes                                          `BYTES`; `with_bytes` returns the bytes
tuples, sets, numpy arrays, torch tensors      lists; arrays and tensors without an axis numbers
mappings, dataclasses                          dicts, whose keys are text: ``str()`` of the key
enums; dates and times                         their value; text in the form of ISO 8601
integers beyond the range of float             text, of more than about 4,200 digits hexadecimal
values of other types                          their ``str()``
============================================== ==========================================
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import math
import sys
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time
from enum import Enum
from numbers import Real
from typing import Any

import orjson

BYTES = "$bytes"
"""Bytes are written as an object with this key, and their base64 as its value."""

_DIGITS = bytes(48 if 48 <= byte <= 57 else byte for byte in range(256))
"""A table for `bytes.translate` that makes all digits 0."""
# All integers of up to 18 digits fit into 64 bits.
_LONG_NUMBER = b"0" * 19

_MAX_BITS = 14_000
"""Integers up to this many bits (about 4,200 digits) are written in decimal. Python's own limit is 4,300 digits."""

_MAX_DEPTH = 200
"""Values below this number of containers are written as text. orjson's limit is 254."""


def encode(value: Any) -> bytes:
    """Encode a value as `to_json` does, with orjson if orjson supports the value."""
    try:
        return encode_fast(value)
    except TypeError:
        return to_json(value)


def to_json(value: Any) -> bytes:
    """Encode a value as one line of strict UTF-8 JSON."""
    # A lone surrogate cannot be encoded as UTF-8; backslashreplace writes it as a JSON escape.
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")


def decode(text: bytes | str, *, nan: bool = False) -> Any:
    """Decode JSON; integers are exact, whatever their length.

    orjson makes floats of integers beyond 64 bits, so texts with 19 digits in a row are left to Python's parser, as are
    texts with lone surrogates, which orjson rejects.

    Args:
        text: the JSON.
        nan: whether ``NaN``, ``Infinity`` and ``-Infinity`` are accepted, which JSON lacks and Python writes.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        if _LONG_NUMBER not in raw.translate(_DIGITS):
            return orjson.loads(raw)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(text, parse_constant=float if nan else _refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON value")


def with_bytes(value: Any) -> Any:
    """Return a decoded value with bytes in place of the objects that stand for them, see `BYTES`."""
    if isinstance(value, dict):
        if value.keys() == {BYTES}:
            with contextlib.suppress(ValueError, TypeError):  # another program has written it
                return base64.b64decode(value[BYTES], validate=True)
        return {key: with_bytes(item) for key, item in value.items()}
    return [with_bytes(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value made of the types that JSON has, as `to_json` writes it."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:  # most readers refuse it as a number
        return str(value) if value.bit_length() <= _MAX_BITS else hex(value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth > _MAX_DEPTH:  # it may contain itself
        return _text(value)
    if isinstance(value, Mapping):
        return {_text(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return _plain(_known(value), depth + 1)


def _known(value: Any) -> Any:
    """Convert a value of a type that JSON lacks to a similar value that can be encoded."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset | tuple):  # orjson does not write named tuples
        return list(value)
    # orjson writes these three itself; `to_json` does not.
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if type(value) in (datetime, date, time):
        return value.isoformat()
    if isinstance(value, bytes | bytearray | memoryview):
        return {BYTES: base64.b64encode(value).decode()}
    if getattr(getattr(value, "dtype", None), "kind", None) == "M":  # `tolist` of nanoseconds returns integers
        value = value.astype("datetime64[us]")
    if callable(getattr(value, "tolist", None)):
        try:
            return value.tolist()
        # For instance a tensor on a failed device.
        except Exception:
            return _text(value)
    return _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # of a type of the user
        return f"<{type(value).__name__}>"


encode_fast = functools.partial(orjson.dumps, default=_known, option=orjson.OPT_SERIALIZE_NUMPY)
"""Encode a value with orjson.

Raises:
    TypeError: it contains a lone surrogate, an integer beyond 64 bits, or a key that is not text.
"""

encode_line = functools.partial(encode_fast, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
"""Encode a value as `encode_fast` does, with a line end."""

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
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: portable(getattr(value, field.name)) for field in fields(value)}
    if kind is tuple:
        return tuple(map(portable, value))
    if isinstance(value, list | tuple | Set):
        return list(map(portable, value))
    return float(value) if isinstance(value, Real) else str(value)
