import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop import InvalidScoreError
from reward_loop.scoring import normalise

finite = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False, width=32) | st.booleans()


@given(finite)
def test_any_finite_number_is_a_score(number):
    score, extra_info = normalise(number)
    assert score == float(number)
    assert type(score) is float
    assert extra_info == {"acc": number}


@given(finite, st.dictionaries(st.text().filter(lambda key: not key.startswith("reward_")), st.integers()))
def test_a_dict_keeps_all_its_keys(number, others):
    returned = {**others, "score": number}
    assert normalise(returned) == (float(number), returned)


@given(st.none() | st.text() | st.floats() | st.lists(st.floats()) | st.dictionaries(st.text(), st.floats()))
def test_anything_is_a_score_or_none_or_an_invalid_score(returned):
    try:
        score, _ = normalise(returned)
    except InvalidScoreError:
        return
    assert score is None or math.isfinite(score)


@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.float64(0.5), np.array(0.5), Fraction(1, 2), Decimal("0.5")], ids=repr
)
def test_other_libraries_numbers(number):
    assert normalise(number)[0] == 0.5


def test_numpy_scalars_become_plain_numbers():
    assert type(normalise(np.float64(1))[1]["acc"]) is float
    assert normalise(np.bool_(True)) == (1.0, {"acc": True})
    assert normalise({"score": np.int64(2)}) == (2.0, {"score": 2})


def test_torch_scalars():
    torch = pytest.importorskip("torch")
    assert normalise(torch.tensor(0.5)) == (0.5, {"acc": 0.5})
    assert normalise({"score": torch.tensor(1)}) == (1.0, {"score": 1})


class Lost:
    """As a tensor on a device that has failed."""

    shape = ()

    def item(self):
        raise RuntimeError("CUDA error: unspecified launch failure")


@pytest.mark.parametrize("returned", [Lost(), {"score": Lost()}, (Lost(), "p", "e")])
def test_a_number_that_cannot_be_read(returned):
    with pytest.raises(InvalidScoreError, match=r"that cannot be read: RuntimeError\('CUDA error"):
        normalise(returned)


def test_none_is_unscored():
    assert normalise(None) == (None, {})
    assert normalise({"score": None, "reason": "unparsed"}) == (None, {"score": None, "reason": "unparsed"})
    assert normalise((None, "p", "e")) == (None, {"prompt": "p", "explanation": "e"})


def test_a_tuple_has_prompt_and_explanation():
    assert normalise((1, "judge this", "it is right")) == (
        1.0,
        {"prompt": "judge this", "explanation": "it is right"},
    )


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("0.5", "whose score is a str; return a number"),
        (float("nan"), "not finite; return None"),
        (float("-inf"), "not finite"),
        (10**400, "not finite"),
        (3.5e38, "not finite in float32; return None"),
        ({"score": -1e39}, "not finite in float32"),
        ({"acc": 1}, "a dict without `score`.*its keys are acc"),
        ({"score": "high"}, "whose score is a str"),
        ({"score": math.nan}, "not finite"),
        ({"score": 1, "reward_error": "x"}, "returned reward_error, which the reward loop itself fills in"),
        ((1, 2), r"a tuple of 2.*not \(score, prompt, explanation\)"),
        ([1.0], "whose score is a list"),
        (np.array([1.0, 2.0]), r"of shape \(2,\); reduce it to one number"),
        (1j, "whose score is a complex"),
        (np.str_("x"), "whose score is a"),
        (object(), "whose score is a object"),
        ("x" * 1000, r"x\.\.\."),
    ],
)
def test_invalid_scores_are_errors(returned, message):
    with pytest.raises(InvalidScoreError, match=message) as caught:
        normalise(returned)
    assert len(str(caught.value)) < 400
