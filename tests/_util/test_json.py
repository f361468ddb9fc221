import pytest

from reward_loop._util.json import MISSING, look_up

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
