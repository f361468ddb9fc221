from __future__ import annotations

import pytest

from examples.gsm8k.reward import compute_score


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        ("1/2", "#### 0.5", "#### 2"),
        ("50%", "#### 50%", "#### 50"),
        ("1,250", "A: $1250.", "#### 1250%"),
        ("it is so #### -7", "#### -7", "#### 7"),
        ("3", "#### 6/2", "#### 3/0"),
    ],
)
def test_numbers_are_compared_by_their_value(reference: str, right: str, wrong: str) -> None:
    assert compute_score(right, reference)["score"] == 1.0
    assert compute_score(wrong, reference)["score"] == 0.0
