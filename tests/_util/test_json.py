import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop._util.json import MISSING, encode, look_up, to_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
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
        ("a.x", MISSING),
        ("a.b.c", MISSING),
        ("list.1", MISSING),
        ("list.x", MISSING),
        ("list.0", {"x": 5}),
        ("a.", MISSING),
        ("", MISSING),
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
