"""Scores from pairwise comparisons and rankings, for functions that score a whole group."""

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
    """Compare entries pairwise, and return each entry's win rate from 0 to 1.

    Args:
        entries: the entries to compare, for instance the responses of a group.
        compare: returns the result of the first entry against the second: 1 for a win, 0 for a loss, 0.5 for a draw,
            or any number between; ``None`` if the judge's verdict cannot be parsed.
        swap: compare each pair in both orders. This cancels the position bias of judges: an entry that wins in one
            order only has a mean of 0.5 for the pair.
        opponents: the number of opponents of each entry, rounded up to an even number; by default all others.

    Returns:
        For each entry the mean of its results, or ``None`` if none of its verdicts could be parsed.

    Raises:
        ValueError: ``compare`` returned neither ``None`` nor a number from 0 to 1.
        Exception: ``compare`` raised it; the other comparisons are cancelled.

    Example::

        async def better(first: str, second: str) -> float | None:
            return await ask_judge(first, second)

        scores = await tournament(responses, better, opponents=4)
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
    """Return evenly spaced scores for ranked entries: 1 for the best, 0 for the last.

    Args:
        order: the indices of the entries (from 0), best first. A single entry gets the score 1.

    Returns:
        The score of each entry, in order of the indices: ``ranking([2, 0, 1]) == [0.5, 0.0, 1.0]``.

    Raises:
        ValueError: an entry is missing or occurs twice.
    """
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"order must contain each index from 0 to {len(order) - 1} once; got {shorten(order)}")
    scores = [0.0] * len(order)
    for place, entry in enumerate(order):
        scores[entry] = 1.0 - place / max(1, len(order) - 1)
    return scores


def _pairs(count: int, opponents: int | None) -> list[tuple[int, int]]:
    """Return the pairs to compare. In a circle of all entries, each meets its neighbours up to a fixed distance."""
    distances = count // 2 if opponents is None else min(count // 2, (opponents + 1) // 2)
    pairs = {frozenset((i, (i + step) % count)): None for step in range(1, distances + 1) for i in range(count)}
    return [(min(pair), max(pair)) for pair in pairs]


async def _ask(compare: Callable[[T, T], Awaitable[float | None]], first: T, second: T) -> float | None:
    result = await compare(first, second)
    if result is None:
        return None
    if not isinstance(result, int | float) or not 0 <= result <= 1:
        raise ValueError(f"compare must return a number from 0 (the second wins) to 1, or None; got {shorten(result)}")
    return float(result)
