"""Functions behind `reward-loop serve`, and clients in the same process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from reward_loop.adapters.serve import RewardService
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


class Centred:
    """The length of a response, minus the mean of its group; the response ``raise`` fails."""

    def compute_score(self, solution_str: str) -> float:
        if solution_str == "raise":
            raise ValueError("five")
        return float(len(solution_str))

    def post_process_scores(self, scores: list[float]) -> list[float]:
        return [score - sum(scores) / len(scores) for score in scores]


def scorer(function: Any = equals, manager: str = "naive", **options: Any) -> Scorer:
    """Return a function with its manager."""
    return load_scorer(function, manager, RewardLoopConfig(**{"max_failed_share": 1.0, **options}))


@asynccontextmanager
async def client_of(made: Scorer | None = None, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a service in this process."""
    service = RewardService(made or scorer(), **options)
    async with (
        service,
        httpx.AsyncClient(transport=httpx.ASGITransport(service), base_url="http://localhost") as client,
    ):
        yield client


async def post(client: httpx.AsyncClient, body: Any, status: int = 200) -> Any:
    """Return the reply to a request to ``/score``, which must have the status."""
    answer = await client.post("/score", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()
