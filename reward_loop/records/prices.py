"""The prices of tokens, and the cost of requests to models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reward_loop.errors import ConfigError

__all__ = ["NO_PRICES", "Price", "Prices", "parse_price"]


class Price(NamedTuple):
    """The prices of a million tokens, in any currency."""

    prompt: float
    reply: float

    def cost(self, prompt_tokens: float, reply_tokens: float) -> float:
        """Return the cost of tokens of requests and of replies."""
        return (prompt_tokens * self.prompt + reply_tokens * self.reply) / 1e6


def parse_price(text: str) -> Price:
    """Return the prices in ``PROMPT:REPLY``.

    Raises:
        ConfigError: they are not two numbers of at least 0.
    """
    try:
        prompt, reply = map(float, text.split(":"))
    except ValueError:
        prompt = reply = math.nan
    if not (math.isfinite(prompt + reply) and min(prompt, reply) >= 0):
        raise ConfigError(f"--price {text}: expected the prices of a million tokens as PROMPT:REPLY, such as 0.15:0.6")
    return Price(prompt, reply)


@dataclass(frozen=True)
class Prices:
    """The prices of models.

    Example::

        prices = Prices.parse(["0.15:0.6", "judge-70b=0.9:0.9"])
        prices.cost("judge-70b", 1_000_000, 0)  # 0.9
        prices.cost("another", 1_000_000, 0)  # 0.15
    """

    models: Mapping[str, Price] = field(default_factory=dict)
    other: Price | None = None
    """The price of all other models; ``None`` if it is unknown."""

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Prices:
        """Return the prices in texts such as ``MODEL=PROMPT:REPLY``, or ``PROMPT:REPLY`` for all other models.

        Raises:
            ConfigError: a text is not of this form, or there are two prices for a model.
        """
        found: dict[str, Price] = {}
        for text in texts:
            model, _, price = text.rpartition("=")
            if model in found:
                raise ConfigError(f"--price {text}: there are two prices for {model or 'all other models'}")
            found[model] = parse_price(price)
        other = found.pop("", None)
        return cls(found, other)

    def __bool__(self) -> bool:
        return bool(self.models) or self.other is not None

    def of_all(self, models: Iterable[str]) -> Price | None:
        """Return the price of these models if it is the same for all of them; without models, that of other models."""
        found = {self.models.get(model, self.other) for model in models} or {self.other}
        return found.pop() if len(found) == 1 else None

    def cost(self, model: str | None, prompt_tokens: float | None, reply_tokens: float | None) -> float | None:
        """Return the cost of requests to a model; ``None`` if its price is unknown. Unknown numbers of tokens are 0."""
        price = self.models.get(model or "", self.other)
        return None if price is None else price.cost(prompt_tokens or 0, reply_tokens or 0)

    def cost_of(self, exchange: Mapping[str, Any]) -> float | None:
        """Return the cost of a recorded exchange with a model server; ``None`` if the price is unknown."""
        model = exchange.get("model") or exchange.get("url")
        return self.cost(model, exchange.get("prompt_tokens"), exchange.get("completion_tokens"))


NO_PRICES = Prices()
"""All prices are unknown."""
