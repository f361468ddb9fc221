"""Services for tests: a function, its manager, and clients in the same process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from reward_loop.adapters.service.app import create_app
from reward_loop.adapters.service.dialects import DialectOptions
from reward_loop.adapters.service.service import RewardService
from reward_loop.config import RewardLoopConfig
from reward_loop.managers.scorer import Scorer, load_scorer


def equals(solution_str: str, ground_truth: Any) -> dict[str, float] | None:
    """Return 1 for the right answer, and fail in the ways that some answers name."""
    if solution_str == "raise":
        raise ValueError("five")
    if solution_str == "none":
        return None
    if solution_str == "nan":
        return {"score": float("nan")}
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}


def ranks(solution_strs: list[str]) -> list[float]:
    """Return the rank of each response in its group, by length."""
    return [float(sorted(solution_strs, key=len).index(text)) for text in solution_strs]


def scorer(function: Any = equals, manager: str = "naive", **options: Any) -> Scorer:
    """Return a function with its manager."""
    return load_scorer(function, manager, RewardLoopConfig(**{"max_failed_share": 1.0, **options}))


@asynccontextmanager
async def client_of(
    made: Scorer | None = None, dialects: DialectOptions | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a service in this process. Options are those of `RewardService` and `create_app`."""
    of_app = {name: options.pop(name) for name in ("key", "max_body_bytes") if name in options}
    service = RewardService(made or scorer(), **options)
    app = create_app(service, options=dialects, **of_app)
    async with service, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        yield client


async def post(client: httpx.AsyncClient, path: str, body: Any, status: int = 200) -> Any:
    """Return the reply to a request, which must have the status."""
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()
