from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from reward_loop import RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop.client import Judge, Judgement, Number, majority, panel
from reward_loop.errors import ConfigError
from reward_loop.testing import FakeJudge, Status

SCORES = {"one": "Score: 9", "two": "Score: 2", "three": "no idea"}


def rate(body: Mapping[str, Any]) -> str:
    return SCORES[body["model"]]


async def judged(server: FakeJudge, *models: str, **options: Any) -> Judgement:
    judges = {model: Judge("{{answer}}", Number(1, 10), model=model) for model in models}
    return await panel({name: judge(server.address, answer="4") for name, judge in judges.items()}, **options)


async def test_the_score_is_the_mean_of_the_judges_that_gave_a_verdict() -> None:
    async with FakeJudge(rate) as server:
        judgement = await judged(server, "one", "two", "three")
    assert (judgement.score, judgement.components) == (5.5, {"one": 9.0, "two": 2.0})
    assert judgement.verdict == {"one": 9.0, "two": 2.0, "three": None}
    reward = judgement.reward()
    assert (reward["score"], reward["one"]) == (5.5, 9.0)
    assert "[two]\nScore: 2" in reward["explanation"]


async def test_below_the_quorum_without_a_failure_a_response_is_unscored() -> None:
    async with FakeJudge(rate) as server:
        judgement = await judged(server, "one", "three")
    assert judgement.score is None
    assert judgement.unscored == "1 of 2 judges gave a verdict, and the quorum is 2"


@pytest.mark.parametrize(
    ("faults", "calls"),
    [
        ([Status(401), Status(401)], 1),  # permanent: not called again
        ([Status(429, 0.01), Status(429, 0.01)], 2),  # transient
        ([Status(429, 0.01), Status(401)], 2),  # two of the three suffice, so another call may reach the quorum
    ],
)
async def test_below_the_quorum_with_a_failure_a_sample_fails_and_a_transient_failure_is_retried(
    faults: list[Status], calls: int
) -> None:
    async with FakeJudge("Score: 7") as server:

        async def compute_score(solution_str: str) -> dict[str, Any]:
            judges = [Judge("{{answer}}", Number(1, 10), address=server.address) for _ in range(3)]
            asked = {f"judge_{i}": judge(answer=solution_str) for i, judge in enumerate(judges)}
            return (await panel(asked, quorum=2)).reward()

        server.script(*faults)
        options = RewardLoopConfig(retry={"initial_wait": 0.001})
        result = await ScoringFunction(compute_score, options=options)(RewardSample("4"))
    assert result.attempts == calls
    if calls == 1:
        assert result.outcome == "failed"
        assert "1 of 3 judges gave a verdict, and the quorum is 2: judge_" in str(result.error)
        assert "status 401" in str(result.error)
    else:
        assert (result.outcome, result.score) == ("scored", 7.0)


async def test_a_mistake_is_an_error_whatever_the_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    async with FakeJudge("Score: 7") as server:
        judge = Judge("{{answer}}", Number(1, 10), address=server.address)
        keyed = Judge("{{answer}}", Number(1, 10), address=server.address, api_key_env="NO_SUCH_KEY")
        with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
            await panel({"a": judge(answer="4"), "b": keyed(answer="4")}, quorum=1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"quorum": 0}, "quorum=0: it must be from 1 to the number of judges, 2"),
        ({"quorum": 3}, "quorum=3: it must be from 1 to the number of judges, 2"),
    ],
)
@pytest.mark.filterwarnings("error:coroutine .* was never awaited")
async def test_an_invalid_argument_is_an_error_before_a_judge_is_asked(options: Any, problem: str) -> None:
    async with FakeJudge("Score: 7") as server:
        judge = Judge("{{answer}}", Number(1, 10), address=server.address)
        running = asyncio.ensure_future(judge(answer="5"))
        with pytest.raises(ConfigError, match=problem):
            await panel({"a": judge(answer="4"), "b": running}, **options)
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(ConfigError, match="number of judges, 0"):
            await panel({})
        assert server.requests == []


@pytest.mark.parametrize(("scores", "score"), [([1, 1, 0], 1), ([0.0], 0), ([1, 0], 0.5), ([3, 7, 3, 7, 1], 5)])
def test_the_majority_is_the_most_frequent_score_and_of_equally_frequent_ones_the_mean(
    scores: list[float], score: float
) -> None:
    assert majority({str(i): one for i, one in enumerate(scores)}) == score
