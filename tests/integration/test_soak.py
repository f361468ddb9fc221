import pytest

from benchmarks.soak import soak

pytestmark = pytest.mark.integration


def test_each_sample_ends_once_and_nothing_is_left() -> None:
    result, problems = soak(5_000)
    assert problems == []
    assert {"scored", "unscored", "failed"} == set(result["outcomes"])
