"""The figures of records that the report and the viewer both show, each computed here alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from reward_loop._util.intervals import FALSE_ACCEPT
from reward_loop.errors import ConfigError
from reward_loop.types import finite_number


def false_accepts_of(components: Mapping[str, Any]) -> list[tuple[bool, float]]:
    """Return, for each spot check of a sample with a wrong answer, whether it was accepted, and its chance."""
    found = []
    for name, value in components.items():
        prefix = name.removesuffix(FALSE_ACCEPT)
        # A function of the user may return anything under this name.
        number = finite_number(value) if name == f"{prefix}{FALSE_ACCEPT}" else None
        if number is not None and (not prefix or prefix.endswith("/")):
            chance = components.get(f"{prefix}chance")
            found.append((number > 0, chance if isinstance(chance, int | float) and chance > 0 else 1.0))
    return found


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
