from __future__ import annotations

import json
from typing import Any

import pytest

from reward_loop import ConfigError, RewardSample, ScoringFunction, limit
from reward_loop.client import Judge, Number, classify
from reward_loop.config import RewardLoopConfig, parse
from reward_loop.testing import FakeJudge, Status

judge = Judge("Rate {{answer}}", Number(1, 10))
OPTIONS = parse(RewardLoopConfig, {"retry": {"max_attempts": 1}}, "reward_loop")


async def error_of(function: Any, address: str | None = None) -> str:
    result = await ScoringFunction(function, options=OPTIONS)(RewardSample("x"), reward_router_address=address)
    assert result.error is not None
    return result.error


async def by_judge(reward_router_address: str) -> Any:
    return (await judge(reward_router_address, answer="x")).reward()


async def by_classify(reward_router_address: str) -> Any:
    return await classify(reward_router_address, "x")


async def with_a_wrong_field() -> Any:
    return await judge("127.0.0.1:1", anser="x")


def in_an_unknown_place() -> float:
    with limit("judge", tokens="many"):  # type: ignore[arg-type]
        return 1.0


@pytest.mark.parametrize("function", [by_judge, by_classify])
async def test_an_error_of_our_client_shows_the_line_that_called_it(function: Any) -> None:
    async with FakeJudge() as server:
        server.script(Status(400))
        error = await error_of(function, server.address)
    assert "RequestError" in error
    assert error.count("  File ") == 1
    assert f"in {function.__name__}\n    return " in error


async def test_wrong_arguments_of_our_functions_show_the_line_that_gave_them() -> None:
    error = await error_of(in_an_unknown_place)
    assert error.count("  File ") == 1
    assert "in in_an_unknown_place\n" in error
    with pytest.raises(ConfigError) as raised:  # it stops the run
        await error_of(with_a_wrong_field)
    assert str(raised.value).count("  File ") == 1
    assert "in with_a_wrong_field\n" in str(raised.value)


async def test_an_error_of_a_library_shows_the_users_line_and_the_last_of_the_library() -> None:
    def reads(solution_str: str) -> Any:
        return parsed(solution_str)

    def parsed(text: str) -> Any:
        return json.loads(text)

    error = await error_of(reads)
    assert error.count("  File ") == 3
    assert "in reads\n" in error
    assert "return json.loads(text)" in error
    assert "in raw_decode" in error


async def test_an_error_of_the_users_own_code_shows_its_last_lines() -> None:
    def one() -> float:
        return two()

    def two() -> float:
        return three()

    def three() -> float:
        return four()

    def four() -> float:
        raise ValueError("deep")

    error = await error_of(one)
    assert [name for name in ("one", "two", "three", "four") if f"in {name}\n" in error] == ["two", "three", "four"]
