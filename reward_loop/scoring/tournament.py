"""Scores from comparisons, for functions that see a whole group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from statistics import fmean
from typing import TypeVar

from reward_loop._util.text import shorten

__all__ = ["ranking", "tournament"]

T = TypeVar("T")


async def tournament(
    entries: Sequence[T],
    compare: Callable[[T, T], Awaitable[float | None]],
    *,
    swap: bool = True,
    opponents: int | None = None,
) -> list[float | None]:
    """Return how much of its comparisons each entry wins, from 0 to 1.

    Args:
        entries: what is compared, for instance the responses of a group.
        compare: says how the first does against the second: 1 if it wins, 0 if it loses, 0.5 for a draw, or anything
            between; ``None`` if the judge's verdict cannot be read.
        swap: ask each pair in both orders, since judges favour a place: who wins in one order only has a draw.
        opponents: how many others each entry meets, rounded up to an even number; by default all.

    Returns:
        For each entry the mean of its results, or ``None`` if no verdict on it could be read.

    Raises:
        ValueError: ``compare`` returned something else.
        Exception: what ``compare`` raised; the other comparisons are cancelled.
    """
    pairs = _pairs(len(entries), opponents)
    orders = pairs + [(second, first) for first, second in pairs] if swap else pairs
    try:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(_ask(compare, entries[first], entries[second])) for first, second in orders]
    except* Exception as errors:
        raise errors.exceptions[0] from None
    results: list[list[float]] = [[] for _ in entries]
    for (first, second), task in zip(orders, asked, strict=True):
        if (result := task.result()) is not None:
            results[first].append(result)
            results[second].append(1.0 - result)
    return [fmean(own) if own else None for own in results]


def ranking(order: Sequence[int]) -> list[float]:
    """Return the scores of entries that are ranked: evenly from 1 for the best to 0 for the last.

    Args:
        order: the places of the entries, counted from 0, the best first. A single one has the score 1.

    Raises:
        ValueError: an entry is missing, or there twice.
    """
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"a ranking names each of {len(order)} entries once, counted from 0; got {shorten(order)}")
    scores = [0.0] * len(order)
    for place, entry in enumerate(order):
        scores[entry] = 1.0 - place / max(1, len(order) - 1)
    return scores


def _pairs(count: int, opponents: int | None) -> list[tuple[int, int]]:
    """Seat the entries in a circle: each meets its neighbours, up to a distance that gives it so many opponents."""
    distances = count // 2 if opponents is None else min(count // 2, (opponents + 1) // 2)
    pairs = {frozenset((i, (i + step) % count)): None for step in range(1, distances + 1) for i in range(count)}
    return [(min(pair), max(pair)) for pair in pairs]


async def _ask(compare: Callable[[T, T], Awaitable[float | None]], first: T, second: T) -> float | None:
    result = await compare(first, second)
    if result is None:
        return None
    if not isinstance(result, int | float) or not 0 <= result <= 1:
        raise ValueError(f"a comparison gives a number from 0 (the second wins) to 1, or None; got {shorten(result)}")
    return float(result)
