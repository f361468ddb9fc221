import asyncio
import math
import threading
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop import InvalidScoreError, NaiveRewardLoopManager, RewardSample, ScoringFunction
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
    ("returned", "score", "extra_info"),
    [
        (np.array(0.5), 0.5, {"acc": 0.5}),
        (np.bool_(True), 1.0, {"acc": True}),
        (Fraction(1, 2), 0.5, {"acc": 0.5}),
        (Decimal("0.5"), 0.5, {"acc": 0.5}),
        ({"score": np.int64(2)}, 2.0, {"score": 2}),
        ((1, "judge this", "it is right"), 1.0, {"prompt": "judge this", "explanation": "it is right"}),
        (None, None, {}),
        (np.ma.masked, None, {"acc": None}),
        ({"score": np.ma.array(0.5, mask=True)}, None, {"score": None}),
        ({"score": None, "reason": "unparsed"}, None, {"score": None, "reason": "unparsed"}),
        ((None, "p", "e"), None, {"prompt": "p", "explanation": "e"}),
    ],
    ids=repr,
)
def test_the_score_and_the_extra_info_of_a_returned_value(returned, score, extra_info):
    assert normalise(returned) == (score, extra_info)
    assert not isinstance(normalise(returned)[1].get("acc"), np.generic)


class Lost:
    """As a tensor on a device that has failed."""

    shape = ()

    def tolist(self):
        raise RuntimeError("CUDA error: unspecified launch failure")


@pytest.mark.parametrize("returned", [Lost(), {"score": Lost()}, (Lost(), "p", "e")])
def test_a_number_that_cannot_be_read(returned):
    with pytest.raises(InvalidScoreError, match=r"that cannot be read: RuntimeError\('CUDA error"):
        normalise(returned)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("0.5", "whose score is a str; return a number"),
        (float("nan"), "not finite; return None"),
        (10**400, "not finite"),
        (3.5e38, "not finite in float32; return None"),
        ({"score": -1e39}, "not finite in float32"),
        ({"acc": 1}, "a dict without `score`.*its keys are acc"),
        ({"score": 1, "reward_error": "x"}, "returned reward_error, which the reward loop itself fills in"),
        ((1, 2), r"a tuple of 2.*not \(score, prompt, explanation\)"),
        (np.array([1.0, 2.0]), r"of shape \(2,\); reduce it to one number"),
        (np.str_("x"), "whose score is a"),
        ("x" * 1000, r"x\.\.\."),
    ],
)
def test_invalid_scores_are_errors(returned, message):
    with pytest.raises(InvalidScoreError, match=message) as caught:
        normalise(returned)
    assert len(str(caught.value)) < 400


async def reward(returned, **sample):
    return await NaiveRewardLoopManager(compute_score=lambda: returned).run_single(
        RewardSample("x", uid="u1", **sample)
    )


@pytest.mark.parametrize(
    ("parts", "length"),
    [
        ({"token_level_scores": [0.5, 0, True]}, 3),
        ({"token_level_scores": [0.5, 0.5]}, None),
        ({"turn_level_scores": (1, 2, 3)}, 7),
        ({"turn_level_scores": []}, 7),
        ({"turn_level_scores": np.array([0.5, 1.0], dtype=np.float32)}, None),
    ],
)
async def test_valid_dense_rewards_are_kept(parts, length):
    info = (await reward({"score": 1.0, **parts}, response_length=length))["reward_extra_info"]
    assert info["reward_outcome"] == "scored"
    for name, scores in parts.items():
        assert list(info[name]) == list(scores)
        assert not isinstance(info[name], np.ndarray)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"token_level_scores": [1, 2]}, "2 token_level_scores, and the response has 3 tokens"),
        ({"token_level_scores": "abc"}, "token_level_scores must be a list of finite numbers; got 'abc'"),
        ({"turn_level_scores": 1.0}, "turn_level_scores must be a list"),
        ({"turn_level_scores": [1, 1e39]}, "finite numbers"),
        ({"turn_level_scores": np.array([0.5, np.nan])}, "finite numbers"),
        ({"turn_level_scores": np.array([[0.5, 1.0]])}, "finite numbers"),
    ],
)
async def test_invalid_dense_rewards_are_failures(parts, message):
    info = (await reward({"score": 1.0, **parts}, response_length=3))["reward_extra_info"]
    assert info["reward_outcome"] == "failed"
    assert info["reward_error"].startswith("sample u1: ")
    assert message in info["reward_error"]


class Verdict(Enum):
    RIGHT = 1


@dataclass
class Detail:
    verdict: Verdict
    seen: set[str]


def returns_its_own_classes():
    return {"score": 1.0, "detail": Detail(Verdict.RIGHT, {"a"}), 7: threading.Lock(), "items": [Verdict.RIGHT, None]}


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.integration)])
async def test_what_a_function_returns_is_made_portable(isolation):
    scoring = ScoringFunction(returns_its_own_classes, isolation=isolation, max_processes=1)
    result = await scoring(RewardSample("4"))
    await asyncio.to_thread(scoring.close)
    found = dict(result.extra_info)
    assert "lock" in found.pop("7")
    assert found == {"score": 1.0, "detail": {"verdict": 1, "seen": ["a"]}, "items": [1, None]}
