import dataclasses
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ScoringError
from reward_loop.managers.base import decide
from reward_loop.types import RESERVED_KEYS, Outcome, RewardResult, finite_number, missing


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (np.array(3), 3.0),
        (b"2", None),
        ([1.0], None),
        (np.array([1.0]), None),
        (math.nan, None),
        (Decimal("sNaN"), None),
        (10**400, None),
    ],
)
def test_finite_numbers(value: Any, number: float | None) -> None:
    assert finite_number(value) == number


def test_components_have_no_texts_no_measurements_and_only_keys_of_text() -> None:
    info: dict[Any, Any] = {"score": 1, "right": True, "a/x": 2, "text": "t", "reward_work_s": 3.0, 7: 0.5}
    assert RewardResult(Outcome.SCORED, 1.0, info).components == {"right": 1.0, "a/x": 2.0}


SCORED = RewardResult(Outcome.SCORED, 0.5, {"acc": 0.5}, work_s=1.0, wait_s=2.0, queue_s=3.0, outage_s=4.0)
FAILED = RewardResult(Outcome.FAILED, None, error="down", attempts=2, exception=ScoringError("down", cause="KeyError"))


@pytest.mark.parametrize("result", [SCORED, FAILED])
@pytest.mark.parametrize("policy", ["mask", "default"])
def test_a_result_is_the_same_after_it_was_a_reward(result: RewardResult, policy: Any) -> None:
    decided = decide(result, RewardLoopConfig(on_failed=policy, default_score=-1.0), total_s=9.0)
    reward = decided.to_reward()
    assert reward["reward_extra_info"].keys() >= RESERVED_KEYS
    again = RewardResult.of(reward)
    assert (again.to_reward(), again.cause) == (reward, decided.cause)
    assert dataclasses.replace(again, policy=decided.policy) == decided


@pytest.mark.parametrize(
    ("value", "is_missing"),
    [
        *((value, True) for value in (None, math.nan, np.float32("nan"), np.datetime64("NaT"), Decimal("nan"))),
        *((value, True) for value in ([None], [math.nan, None], [[None]], np.array([np.nan]), np.array(math.nan))),
        *((value, False) for value in ("", "nan", "None", 0, 0.0, False, [], {}, {"a": None}, [None, "4"], b"")),
        *((value, False) for value in (np.array([1.0, np.nan]), np.array([]), math.inf, object())),
    ],
)
def test_what_is_missing(value: Any, is_missing: bool) -> None:
    assert missing(value) is is_missing


def test_what_pandas_has_no_value_for_is_missing() -> None:
    pandas = pytest.importorskip("pandas")
    assert missing(pandas.NA)
    assert missing(pandas.NaT)
    assert missing([pandas.NA])
    assert not missing(pandas.Timestamp(0))
