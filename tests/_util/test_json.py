import dataclasses
import datetime
import decimal
import enum
import json
import math
import sys
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop._util.json import MISSING, decode, encode, look_up, to_json, with_bytes

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
    max_leaves=8,
)

DATA = {"a.b": 1, "a": {"b": 2, "c": {"d": 3}, "e.f": 4}, "list": [{"x": 5}], "none": None}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("a.b", 1),
        ("a.c.d", 3),
        ("a.e.f", 4),
        ("list.0.x", 5),
        ("none", None),
        ("a.b.c", MISSING),
        ("list.1", MISSING),
        ("list.x", MISSING),
        ("list.0", {"x": 5}),
        ("a.", MISSING),
    ],
)
def test_values_by_path(path: str, value: object) -> None:
    assert look_up(DATA, path) == value


@given(VALUES)
def test_any_value_is_one_line_of_strict_json(value: Any) -> None:
    for encoded in (to_json(value), encode(value)):
        assert b"\n" not in encoded
        json.loads(encoded.decode("utf-8"), parse_constant=lambda constant: pytest.fail(constant))


@pytest.mark.parametrize(
    ("value", "read"),
    [
        # Readers such as orjson, DuckDB and browsers refuse integers beyond the range of float as numbers.
        (2**1023, float(2**1023)),
        (10**400, str(10**400)),
        (-(10**5000), hex(-(10**5000))),
        (np.array([1.0, np.nan]), [1.0, None]),
        (np.int64(3), 3),
        ("\ud800", "\ud800"),
        (int, "<class 'int'>"),
    ],
    ids=["number", "text", "hexadecimal", "array", "scalar", "surrogate", "type"],
)
def test_values_that_json_lacks(value: Any, read: Any) -> None:
    assert json.loads(to_json({"value": value})) == {"value": read}
    if not isinstance(value, str):
        assert orjson.loads(to_json(value)) == read


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    def tolist(self) -> None:
        raise RuntimeError("no list")


def of_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        {("a", 1): 2, None: 3, 4: 5, b"k": 6},
        Hostile(),
        {Hostile(): 1},
        of_itself(),
        np.array([1j, np.datetime64("2026-01-01")], dtype=object),
        np.datetime64("NaT"),
        np.zeros(2, dtype=[("a", "i4")]),
        np.float16("inf"),
        datetime.datetime(1, 1, 1),
        decimal.Decimal("NaN"),
        lambda: 0,
    ],
    ids=lambda value: type(value).__name__,
)
def test_odd_values_of_python_and_numpy_are_encoded(value: Any) -> None:
    for encoded in (to_json({"value": value}), encode({"value": value})):
        assert list(json.loads(encoded)) == ["value"]


@dataclasses.dataclass
class Data:
    a: int
    b: Any


class Pair(NamedTuple):
    a: int
    b: Any


class Color(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (memoryview(b"a\xff"), b"a\xff"),
        (np.array([b"a", b"b"]), [b"a", b"b"]),
        ({"a": [bytearray(b"\xff"), {"b": np.bytes_(b"c")}]}, {"a": [b"\xff", {"b": b"c"}]}),
        ({"$bytes": "AAAA", "b": 1}, {"$bytes": "AAAA", "b": 1}),
        ({"$bytes": "no base64"}, {"$bytes": "no base64"}),
        ({1: "a", None: 2, "null": 3}, {"1": "a", "None": 2, "null": 3}),
        (Data(2**70, b"x"), {"a": 2**70, "b": b"x"}),
        (Pair(1, "x"), [1, "x"]),
        ([2**70, Color.RED], [2**70, "red"]),
        ([2**70, datetime.datetime(2026, 1, 2, 3)], [2**70, "2026-01-02T03:00:00"]),
        ([2**70, np.datetime64("2026-01-02T03", "ns")], [2**70, "2026-01-02T03:00:00"]),
        ({"a": -0.0, "b": np.array(2**63, dtype=np.uint64)}, {"a": -0.0, "b": 2**63}),
    ],
)
def test_values_come_back_alike_whatever_is_beside_them(value: Any, read: Any) -> None:
    for encoded in (encode(value), to_json(value)):
        assert repr(with_bytes(decode(encoded))) == repr(read)
        assert decode(encode(decode(encoded))) == decode(encoded)


@given(VALUES)
def test_integers_and_bytes_come_back_as_they_were(value: Any) -> None:
    read = with_bytes(decode(encode({"value": value})))["value"]

    def compare(one: Any, other: Any) -> None:
        if isinstance(one, dict):
            for key, value in {str(key): value for key, value in one.items()}.items():
                compare(value, other[key])
        elif isinstance(one, list | tuple):
            for left, right in zip(one, other, strict=True):
                compare(left, right)
        elif isinstance(one, int) and abs(one) > sys.float_info.max:
            assert int(other, 0) == one
        elif isinstance(one, float):
            assert other == (one if math.isfinite(one) else None)
        else:
            assert (other, type(other)) == (one, type(one))

    compare(value, read)


@pytest.mark.parametrize("number", [2**63, 2**64, -(2**64) - 1, 10**30 + 1, 2**1000 + 1])
def test_integers_are_read_exactly(number: int) -> None:
    assert decode(b'{"a": [%d, 1.5, 12345678901234567890123.5]}' % number) == {
        "a": [number, 1.5, 1.2345678901234568e22]
    }


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "{", "[" * 100_000, "", "\xff", "{'a': 1}"])
def test_what_is_not_json_is_an_error(text: str) -> None:
    for given_text in (text, text.encode("latin-1")):
        with pytest.raises(ValueError):  # noqa: PT011 (the messages are those of the parsers)
            decode(given_text)
    if "N" in text or "I" in text:
        decode(text, nan=True)
