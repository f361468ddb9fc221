"""Estimates the requests and tokens of scoring (``reward-loop score --dry-run``), without sending a request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from reward_loop._util.causes import Causes
from reward_loop._util.signals import run
from reward_loop.client.plan import NOT_SENT, RequestPlan
from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers.scorer import functions_of, reward_of
from reward_loop.offline.inputs import Inputs
from reward_loop.offline.rows import Fields, Row
from reward_loop.records.prices import Price

__all__ = ["Estimate", "dry_run_options", "estimate"]

SAMPLED = 100
"""The largest number of rows that are tried."""

CHARACTERS_PER_TOKEN = 4


@dataclass(slots=True)
class Estimate:
    """The estimate for all rows, from the requests of some."""

    rows: int
    tried: int
    """The number of rows for which the function was called, chosen at random."""
    requests: float = 0.0
    prompt_tokens: float = 0.0
    """Characters of the requests / `CHARACTERS_PER_TOKEN`."""
    max_reply_tokens: float | None = 0.0
    """The sum of the requests' ``max_tokens``; ``None`` if a request has none."""
    models: list[str] = field(default_factory=list)
    refused: int = 0
    """Connections of other clients that were refused, for the tried rows: their requests are not in the estimate."""
    causes: Causes = field(default_factory=Causes)
    """Why tried rows failed, other than for a request that was not sent."""

    def cost(self, price: Price) -> tuple[float, float | None]:
        """Return the cost without any reply, and with the longest replies; ``None`` if their length is unknown."""
        longest = self.max_reply_tokens
        return price.cost(self.prompt_tokens, 0), None if longest is None else price.cost(self.prompt_tokens, longest)


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

    A function fails at its first request, so requests that depend on a reply are not counted.

    Args:
        source: the input.
        manager: the manager, with the options of `dry_run_options`.
        fields: the field mapping.
        concurrency: maximum number of rows in flight.

    Raises:
        ConfigError: a function runs in processes, where its requests cannot be stopped.
    """
    if any(getattr(function, "in_processes", False) for function in functions_of(manager)):
        raise ConfigError("--dry-run: the function runs in processes, where its requests would be sent")
    rows = source.count()
    # At random, because groups of responses make every fourth or eighth row alike.
    chosen = set(random.Random(0).sample(range(rows), min(rows, SAMPLED)))
    tried = [row for row in source.rows() if row.index in chosen]
    found = Estimate(rows, len(tried))
    with RequestPlan() as plan:
        run(_try(iter(tried), manager, fields, concurrency, found))
    scale = rows / len(tried) if tried else 0.0
    limits = [request.max_tokens for request in plan.requests]
    found.requests = scale * len(plan.requests)
    found.prompt_tokens = scale * sum(request.characters for request in plan.requests) / CHARACTERS_PER_TOKEN
    found.max_reply_tokens = None if None in limits else scale * sum(limit or 0 for limit in limits)
    found.models = sorted({request.model or request.url for request in plan.requests})
    found.refused = plan.refused
    return found


async def _try(rows: Iterator[Row], manager: Any, fields: Fields, concurrency: int, found: Estimate) -> None:
    async def worker() -> None:
        for row in rows:
            try:
                reward = await reward_of(manager, fields.to_sample(row), row.name)
                error = (reward.get("reward_extra_info") or {}).get("reward_error")
            except RewardLoopError as stopped:  # for example, the policy raise of a component
                error = str(stopped)
            if error and NOT_SENT not in error:
                found.causes.add(error)

    async with asyncio.TaskGroup() as workers:
        for _ in range(concurrency):
            workers.create_task(worker())
