"""The prices of models, and the cost of their tokens."""

from __future__ import annotations

import pytest

from reward_loop.errors import ConfigError
from reward_loop.records.prices import NO_PRICES, Price, Prices, parse_price


def test_a_price_is_that_of_a_million_tokens() -> None:
    assert parse_price("0.5:2") == Price(0.5, 2.0)
    assert parse_price("0.5:2").cost(1_000_000, 500_000) == 1.5


def test_a_model_may_have_a_price_of_its_own() -> None:
    prices = Prices.parse(["1:2", "a/judge:70b=3:4", "x=y=5:6"])
    assert prices.cost("a/judge:70b", 1e6, 0) == 3.0
    assert prices.cost("x=y", 1e6, 1e6) == 11.0
    assert prices.cost("another", 0, 1e6) == 2.0
    assert prices.cost(None, None, None) == 0.0


def test_without_a_price_the_cost_is_unknown() -> None:
    assert not NO_PRICES
    assert NO_PRICES.cost("judge", 1, 1) is None
    prices = Prices.parse(["judge=1:2"])
    assert prices
    assert prices.cost("another", 1, 1) is None


def test_the_cost_of_an_exchange_is_that_of_its_model_or_address() -> None:
    prices = Prices.parse(["judge=1:2", "http://h:1/score=10:0"])
    assert prices.cost_of({"model": "judge", "prompt_tokens": 1e6, "completion_tokens": 1e6}) == 3.0
    assert prices.cost_of({"model": None, "url": "http://h:1/score", "prompt_tokens": 1e6}) == 10.0
    assert prices.cost_of({"model": "judge", "prompt_tokens": None}) == 0.0
    assert prices.cost_of({"model": "another"}) is None


@pytest.mark.parametrize("text", ["1", "1:2:3", "a:b", "-1:2", "nan:1", "judge=", "judge=1", "judge"])
def test_an_invalid_price_is_an_error_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"PROMPT:REPLY, such as 0.15:0.6"):
        Prices.parse([text])


def test_two_prices_for_one_model_are_an_error() -> None:
    with pytest.raises(ConfigError, match="two prices for judge"):
        Prices.parse(["judge=1:2", "judge=3:4"])
    with pytest.raises(ConfigError, match="two prices for all other models"):
        Prices.parse(["1:2", "3:4"])


def test_several_models_have_one_price_only_if_it_is_the_same() -> None:
    prices = Prices.parse(["1:2", "large=3:4", "larger=3:4"])
    assert prices.of_all(["large", "larger"]) == Price(3.0, 4.0)
    assert prices.of_all(["small"]) == prices.of_all([]) == Price(1.0, 2.0)
    assert prices.of_all(["large", "small"]) is None
    assert Prices.parse(["large=3:4"]).of_all(["small"]) is None
    assert NO_PRICES.of_all(["large"]) is None
