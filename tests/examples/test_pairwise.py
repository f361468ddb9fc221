from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.judges.pairwise import Comparison, Pairwise, compare_all, order_flips, win_rates
from reward_loop import RewardAgent, RewardSample
from reward_loop.managers import GroupRewardLoopManager
from reward_loop.scoring import ListScoringFunction
from reward_loop.testing import FakeJudge

TEXTS = ["a", "aaaa", "aa", "aaa"]


def longer(body: Mapping[str, Any]) -> str:
    first, second = re.findall(r"<text-\w+>\n(a*)\n", body["messages"][-1]["content"])
    return "[[A]]" if len(first) > len(second) else "[[B]]"


async def judged(reply: Any, **kwargs: Any) -> tuple[list[float], list[dict[str, Any]], int]:
    async with FakeJudge(reply) as server:
        manager = GroupRewardLoopManager(
            compute_score=ListScoringFunction(Pairwise, reward_kwargs=kwargs), reward_router_address=server.address
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
    assert (scores[1], scores[0]) == (max(scores), min(scores)) == (1.0, 0.0)
    assert ("order_flips" in extra_infos[0]) == (options == {})


async def test_a_judge_that_prefers_the_first_answer_is_seen_and_cancelled() -> None:
    scores, extra_infos, _ = await judged("[[A]]")
    assert scores == [0.5] * 4
    assert {(info["order_flips"], info["first_wins"]) for info in extra_infos} == {(1.0, 1.0)}
    scores, extra_infos, _ = await judged("[[A]]", opponents=2, both_orders=False)
    assert scores == [0.5] * 4  # in a circle, each is first once and second once
    assert extra_infos[0]["first_wins"] == 1.0


async def test_responses_without_a_verdict_are_unscored() -> None:
    _, extra_infos, _ = await judged("I cannot decide.")
    assert all(info["reward_masked"] for info in extra_infos)


@given(st.integers(2, 20), st.integers(1, 20))
def test_each_response_has_the_configured_number_of_opponents(count: int, opponents: int) -> None:
    async def draw(first: int, second: int) -> float:
        return 0.5

    compared = asyncio.run(compare_all(list(range(count)), draw, swap=False, opponents=opponents))
    assert len(compared) == len({frozenset((one.first, one.second)) for one in compared})
    for index in range(count):
        first = sum(one.first == index for one in compared)
        second = sum(one.second == index for one in compared)
        assert first + second == min(opponents + opponents % 2, count - 1)
        assert abs(first - second) <= 1


def test_order_flips_are_the_share_of_pairs_that_the_order_decides() -> None:
    compared = [Comparison(0, 1, 1.0), Comparison(1, 0, 1.0), Comparison(0, 2, 0.0), Comparison(2, 0, 1.0)]
    assert order_flips(3, compared) == [0.5, 1.0, 0.0]
    assert win_rates(3, compared) == [0.25, 0.5, 1.0]
    for other in (0.5, None):  # a draw or a missing verdict in one order is no flip
        flips = order_flips(2, [Comparison(0, 1, 1.0), Comparison(1, 0, other)])
        assert flips == ([None, None] if other is None else [0.0, 0.0])
