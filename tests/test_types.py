import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from reward_loop.types import finite_number, returned_numbers


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (2, 2.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.array(3), 3.0),
        (Decimal("1.5"), 1.5),
        ("2", None),
        (b"2", None),
        (None, None),
        ([1.0], None),
        (np.array([1.0]), None),
        (math.nan, None),
        (-math.inf, None),
        (Decimal("sNaN"), None),
        (10**400, None),
    ],
)
def test_finite_numbers(value: Any, number: float | None) -> None:
    assert finite_number(value) == number


def test_returned_numbers_have_no_texts_no_measurements_and_only_keys_of_text() -> None:
    info: dict[Any, Any] = {"score": 1, "right": True, "a/seconds": 1.0, "a/x": 2, "text": "t", "reward_seconds": 3.0}
    assert returned_numbers({**info, 7: 0.5}) == {"score": 1.0, "right": 1.0, "a/x": 2.0}
