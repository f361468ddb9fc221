"""Estimates the requests and tokens of scoring (``reward-loop score --dry-run``), without sending a request."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reward_loop._util.causes import Causes
from reward_loop._util.signals import run
from reward_loop._util.text import rounded
from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers.scorer import functions_of, reward_of
from reward_loop.offline.inputs import Inputs
from reward_loop.offline.rows import Fields, Row
from reward_loop.offline.run import for_each
from reward_loop.records.prices import Prices

__all__ = ["Estimate", "dry_run_options", "estimate", "show_estimate"]

SAMPLED = 100
"""The largest number of rows that are tried."""

CHARACTERS_PER_TOKEN = 4


@dataclass(slots=True)
class Estimate:
    """The estimate for all rows, from the requests of some."""

    rows: int
    tried: int
    """The number of rows for which the function was called, chosen at random."""
    requests: float
    prompt_tokens: float
    """Characters of the requests / `CHARACTERS_PER_TOKEN`."""
    max_reply_tokens: float | None
    """The sum of the requests' ``max_tokens``; ``None`` if a request has none."""
    models: list[str]
    refused: int
    """Connections of other clients that were refused, for the tried rows: their requests are not in the estimate."""
    causes: Causes
    """Why tried rows failed, other than for a request that was not sent."""

    def costs(self, prices: Prices) -> tuple[float | None, float | None]:
        """Return the cost without any reply, and with the longest replies; ``None`` if it is unknown."""
        price, longest = prices.of_all(self.models), self.max_reply_tokens
        if price is None:
            return None, None
        return price.cost(self.prompt_tokens, 0), None if longest is None else price.cost(self.prompt_tokens, longest)

    def to_dict(self, prices: Prices) -> dict[str, Any]:
        """Return the estimate as values of JSON."""
        low, high = self.costs(prices)
        return {
            "rows": self.rows,
            "tried": self.tried,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "max_reply_tokens": self.max_reply_tokens,
            "min_cost": low,
            "max_cost": high,
            "models": self.models,
            "refused_connections": self.refused,
            "causes": [{"count": count, "example": example} for count, example in self.causes.most_common()],
        }


def dry_run_options(config: RewardLoopConfig) -> RewardLoopConfig:
    """Return the options of a run in which functions fail at each request, nothing is recorded and nothing retried."""
    update = {
        "log_dir": None,
        "job": None,
        "on_failed": "mask",
        "on_unscored": "mask",
        "max_failed_share": 1.0,
        "retry": config.retry.model_copy(update={"max_attempts": 1}),
    }
    return config.model_copy(update=update)


def estimate(source: Inputs, manager: Any, fields: Fields, concurrency: int) -> Estimate:
    """Call the function for at most `SAMPLED` rows, and estimate the requests for all rows; runs its own event loop.

    The manager has the options of `dry_run_options`. A function fails at its first request, so requests that depend on
    a reply are not counted.

    Raises:
        ConfigError: a function runs in processes, where its requests cannot be stopped.
    """
    from reward_loop.client.plan import NOT_SENT, RequestPlan  # takes 0.2 s, which other commands save

    if any(getattr(function, "in_processes", False) for function in functions_of(manager)):
        raise ConfigError("--dry-run: the function runs in processes, where its requests would be sent")
    rows = source.count()
    # At random, because groups of responses make every fourth or eighth row alike.
    chosen = set(random.Random(0).sample(range(rows), min(rows, SAMPLED)))
    tried = [row for row in source.rows() if row.index in chosen]
    causes = Causes()

    async def try_row(row: Row) -> None:
        try:
            reward = await reward_of(manager, fields.to_sample(row), row.name)
            error = (reward.get("reward_extra_info") or {}).get("reward_error")
        except RewardLoopError as stopped:  # for example, the policy raise of a component
            error = str(stopped)
        if error and NOT_SENT not in error:
            causes.add(error)

    with RequestPlan() as plan:
        run(for_each(iter(tried), concurrency, try_row))
    scale = rows / len(tried) if tried else 0.0
    limits = [request.max_tokens for request in plan.requests]
    return Estimate(
        rows=rows,
        tried=len(tried),
        requests=scale * len(plan.requests),
        prompt_tokens=scale * sum(request.characters for request in plan.requests) / CHARACTERS_PER_TOKEN,
        max_reply_tokens=None if None in limits else scale * sum(limit or 0 for limit in limits),
        models=sorted({request.model or request.url for request in plan.requests}),
        refused=plan.refused,
        causes=causes,
    )


def show_estimate(found: Estimate, prices: Prices, out: Console) -> None:
    """Print the estimate, and how it was made."""
    table = Table.grid(padding=(0, 2))
    table.add_row("rows", f"{found.rows:,}; the function was called for {found.tried:,}, and no request was sent")
    models = f", to {escape(', '.join(found.models))}" if found.models else ""
    table.add_row("requests", f"about {rounded(found.requests)}{models}")
    if found.requests:
        tokens = f"about {rounded(found.prompt_tokens)} ({CHARACTERS_PER_TOKEN} characters for a token)"
        table.add_row("prompt tokens", tokens)
        longest = found.max_reply_tokens
        text = "unknown: requests have no max_tokens" if longest is None else f"at most {rounded(longest)} (max_tokens)"
        table.add_row("reply tokens", text)
        table.add_row("cost", _cost(found, prices))
    out.print(table)
    if found.requests:
        out.print("Not counted: requests that depend on a reply, and retries.")
    if found.refused:
        out.print(
            f"{found.refused:,} connections of other clients than reward_loop.client were refused: what they would "
            "have sent is not in the estimate."
        )
    for count, example in found.causes.most_common(5):
        failed = f"{count} of the {found.tried} rows failed before a request, first"
        out.print(f"{failed}: {escape(example)}")


def _cost(found: Estimate, prices: Prices) -> str:
    low, high = found.costs(prices)
    if not prices:
        return "unknown: give --price PROMPT:REPLY"
    if low is None:
        return "unknown: --price does not give all models the same price"
    return f"{rounded(low)} and the replies" if high is None else f"{rounded(low)} to {rounded(high)}"
