from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from reward_loop import RewardAgent, RewardSample, ScoringFunction, load_function
from reward_loop.errors import FunctionLoadError
from reward_loop.managers import GroupRewardLoopManager
from reward_loop.scoring import ListScoringFunction
from reward_loop.testing import FakeJudge

TEXTS = ["a", "aaaa", "aa", "aaa"]


def answers_of(body: Mapping[str, Any]) -> list[str]:
    return re.findall(r"<text-\w+>\n(a*)\n", body["messages"][-1]["content"])


def longer(body: Mapping[str, Any]) -> str:
    first, second = answers_of(body)
    return "[[A]]" if len(first) > len(second) else "[[B]]"


async def judged(reply: Any, **kwargs: Any) -> tuple[list[float], list[dict[str, Any]], int]:
    async with FakeJudge(reply) as server:
        manager = GroupRewardLoopManager(
            compute_score=ListScoringFunction(load_function("judge:pairwise"), reward_kwargs=kwargs),
            reward_router_address=server.address,
        )
        async with RewardAgent(manager) as agent:
            samples = [RewardSample(text, extra_info={"question": "?"}) for text in TEXTS]
            rewards = await agent.submit(samples, group_size=len(samples))
        extra_infos = [reward["reward_extra_info"] for reward in rewards]
        return [reward["reward_score"] for reward in rewards], extra_infos, len(server.requests)


@pytest.mark.parametrize(
    ("options", "requests"),
    [
        ({}, 12),
        ({"opponents": None, "both_orders": False}, 6),
        ({"opponents": 2, "both_orders": False}, 4),
    ],
)
async def test_the_share_of_wins_with_fewer_requests(options: dict[str, Any], requests: int) -> None:
    scores, extra_infos, asked = await judged(longer, **options)
    assert asked == requests
    assert scores[1] == max(scores) == 1.0
    assert scores[0] == min(scores) == 0.0
    assert ("order_flips" in extra_infos[0]) == (options == {})


async def test_a_judge_that_prefers_the_first_answer_is_seen_and_cancelled() -> None:
    scores, extra_infos, _ = await judged("[[A]]")
    assert scores == [0.5] * 4
    assert {(info["order_flips"], info["first_wins"]) for info in extra_infos} == {(1.0, 1.0)}
    scores, extra_infos, _ = await judged("[[A]]", opponents=2, both_orders=False)
    assert scores == [0.5] * 4  # in a circle, each is first once and second once
    assert extra_infos[0]["first_wins"] == 1.0


async def test_one_request_ranks_the_whole_group() -> None:
    def rank(body: Mapping[str, Any]) -> str:
        assert answers_of(body) == TEXTS
        return "Ranking: 2 > 4 > 3 > 1"

    scores, extra_infos, requests = await judged(rank, listwise=True)
    assert (scores, requests) == ([0.0, 1.0, pytest.approx(1 / 3), pytest.approx(2 / 3)], 1)
    assert extra_infos[0]["explanation"] == "Ranking: 2 > 4 > 3 > 1"
    _, extra_infos, _ = await judged("Ranking: 2 > 4", listwise=True)
    assert all(info["reward_masked"] for info in extra_infos)


def test_a_listwise_judge_is_one_judge() -> None:
    with pytest.raises(FunctionLoadError, match="listwise asks one judge once"):
        ListScoringFunction(load_function("judge:pairwise"), reward_kwargs={"listwise": True, "votes": 2})


async def test_votes_decide_each_comparison() -> None:
    scores, _, requests = await judged(longer, votes=3, combine="majority")
    assert (scores[1], requests) == (1.0, 36)


def test_a_single_response_function_is_not_a_pairwise_one() -> None:
    with pytest.raises(FunctionLoadError, match="solution_strs"):
        ScoringFunction(load_function("judge:pairwise"))
