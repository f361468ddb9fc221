"""The monitors of judges."""

from __future__ import annotations

import numpy as np
import pytest

from reward_loop.health import JudgeCalls
from reward_loop.health.components import judge_latency, unparsable_verdicts


def test_the_larger_share_of_missing_verdicts_counts() -> None:
    assert unparsable_verdicts(100, 10, None) == 0.1
    assert unparsable_verdicts(100, 10, JudgeCalls(calls=50, without_verdict=20)) == 0.4
    assert unparsable_verdicts(100, 10, JudgeCalls()) == 0.1
    assert unparsable_verdicts(0, 0, None) is None


def test_the_latency_is_the_95th_percentile() -> None:
    assert judge_latency(JudgeCalls(calls=101, seconds=np.arange(101.0))) == pytest.approx(95)
    assert judge_latency(JudgeCalls(calls=2, seconds=np.ones(2))) is None
    assert judge_latency(None) is None
