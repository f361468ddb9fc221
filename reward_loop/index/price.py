"""The price of tokens, and the option of the commands that gives it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import typer

from reward_loop.errors import ConfigError


class Price(NamedTuple):
    """The prices of a million tokens, in any currency."""

    prompt: float
    reply: float

    @classmethod
    def parse(cls, text: str | None) -> Price | None:
        """Return the prices in ``PROMPT:REPLY``; ``None`` without a text.

        Raises:
            ConfigError: they are not two numbers of at least 0.
        """
        if text is None:
            return None
        try:
            prompt, reply = map(float, text.split(":"))
        except ValueError:
            prompt = reply = math.nan
        if not (math.isfinite(prompt + reply) and min(prompt, reply) >= 0):
            raise ConfigError(
                f"--price {text}: expected the prices of a million tokens as PROMPT:REPLY, such as 0.15:0.6"
            )
        return cls(prompt, reply)

    def cost(self, counts: Mapping[str, Any]) -> float:
        """Return the cost of ``prompt_tokens`` and ``completion_tokens``, as an exchange has; missing numbers are 0."""
        prompt, reply = counts.get("prompt_tokens") or 0, counts.get("completion_tokens") or 0
        return float(prompt * self.prompt + reply * self.reply) / 1e6


PriceOption = Annotated[
    str | None,
    typer.Option(
        metavar="PROMPT:REPLY",
        help="Add the cost of each judge, at these prices of a million tokens of requests and of replies, e.g. "
        "[cyan]0.15:0.6[/].",
        show_default=False,
    ),
]
