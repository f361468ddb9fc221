import asyncio

import numpy as np
import pytest

from reward_loop import Outcome, RewardFunctionError, RewardLoopConfig, RewardSample
from reward_loop.scoring import ListScoringFunction

SAMPLES = [
    RewardSample("a", "math", "A", {"level": 1, "tags": ["x"]}, uid="u0"),
    RewardSample("bb", "code", "B", {"level": 2}, uid="u1"),
]


async def test_the_lists_are_in_order():
    def function(data_sources, solution_strs, ground_truths, extra_infos, scale):
        assert (data_sources, solution_strs, ground_truths) == (["math", "code"], ["a", "bb"], ["A", "B"])
        rows = zip(solution_strs, extra_infos, strict=True)
        scores = [{"score": scale * len(text), "seen": info["level"]} for text, info in rows]
        for info in extra_infos:  # the caller's are not changed
            info["level"] = 99
            info.setdefault("tags", []).append("y")
        return scores

    results = await ListScoringFunction(function, reward_kwargs={"scale": 10})(SAMPLES)
    assert [result.score for result in results] == [10, 20]
    assert [result.extra_info["seen"] for result in results] == [1, 2]
    assert [dict(sample.extra_info) for sample in SAMPLES] == [{"level": 1, "tags": ["x"]}, {"level": 2}]


async def test_forms():
    class Judge:
        def __init__(self, bonus):
            self.bonus = bonus

        async def compute_score(self, solution_strs, reward_router_address):
            assert reward_router_address == "h:1"
            await asyncio.sleep(0)
            return [len(text) + self.bonus for text in solution_strs]

    async def plain(solution_strs):
        return tuple(map(len, solution_strs))

    forms = {
        "class": (Judge, {"bonus": 0}),
        "async": (plain, {}),
        "lambda around async": (lambda solution_strs: plain(solution_strs), {}),
        "array": (lambda **lists: np.array([1, 2]), {}),
    }
    for name, (function, kwargs) in forms.items():
        results = await ListScoringFunction(function, reward_kwargs=kwargs)(SAMPLES, reward_router_address="h:1")
        assert [result.score for result in results] == [1, 2], name


async def test_each_sample_has_its_own_outcome():
    def function(solution_strs):
        return [None, {"score": 1}, float("nan"), ConnectionError("429"), {"points": 1}]

    results = await ListScoringFunction(function)([RewardSample("x", uid=f"u{i}") for i in range(5)])
    outcomes = [result.outcome for result in results]
    assert outcomes == [Outcome.UNSCORED, Outcome.SCORED, Outcome.FAILED, Outcome.FAILED, Outcome.FAILED]
    for i in (2, 3, 4):
        assert f"sample u{i}: " in results[i].error
    assert "not finite" in results[2].error
    assert "ConnectionError: 429" in results[3].error
    assert isinstance(results[3].exception, RewardFunctionError)
    assert "without `score`" in results[4].error


@pytest.mark.parametrize("returned", [[1], [1, 2, 3], 1.0, "ab", {"score": [1, 2]}, None])
async def test_another_number_of_scores_fails_all(returned):
    results = await ListScoringFunction(lambda solution_strs: returned)(SAMPLES)
    assert [result.outcome for result in results] == [Outcome.FAILED] * 2
    assert "must return a list of 2 scores" in results[0].error
    assert "sample u1 (" in results[1].error
    assert all(result.queue_s > 0 and result.attempts == 1 for result in results)


async def test_a_call_that_ends_badly_fails_all_and_names_them():
    async def hangs(solution_strs):
        await asyncio.Event().wait()

    def function(solution_strs):
        raise KeyError("rubric")

    late = await ListScoringFunction(hangs, timeout=0.01)(SAMPLES)
    assert all("deadline" in result.error for result in late)
    results = await ListScoringFunction(function)([RewardSample("x", uid=f"u{i}") for i in range(10)])
    assert {result.outcome for result in results} == {Outcome.FAILED}
    assert "u0, u1" in results[0].error
    assert "KeyError: 'rubric'" in results[0].error
    assert "test_batched.py" in results[0].error


async def test_attempts_and_times_are_those_of_the_call():
    calls = 0

    async def function(solution_strs):
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ConnectionError("not yet")
        await asyncio.sleep(0.01)
        return [1, None, float("nan"), ValueError("odd")]

    samples = [RewardSample("x", uid=f"u{i}") for i in range(4)]
    options = RewardLoopConfig(retry={"initial_wait": 0.001})
    results = await ListScoringFunction(function, options=options)(
        [samples[0], RewardSample("", error="broken"), *samples[1:]]
    )
    outcomes = [Outcome.SCORED, Outcome.FAILED, Outcome.UNSCORED, Outcome.FAILED, Outcome.FAILED]
    assert [result.outcome for result in results] == outcomes
    assert [result.attempts for result in results] == [2, 0, 2, 2, 2]
    first = results[0]
    assert first.work_s >= 0.01
    assert first.wait_s > 0
    for result in results[2:]:
        assert (result.work_s, result.wait_s) == (first.work_s, first.wait_s)
