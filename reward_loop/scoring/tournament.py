"""Scores from pairwise comparisons and rankings, for functions that score a whole group."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from reward_loop._util.bounded_tasks import together
from reward_loop._util.text import shorten

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of one comparison of two entries."""

    first: int
    """The index of the entry that was shown first."""
    second: int
    """The index of the entry that was shown second."""
    result: float | None
    """1 if the first entry wins, 0 if it loses, or a number between; ``None`` if the verdict cannot be parsed."""


async def tournament(
    entries: Sequence[T],
    compare: Callable[[T, T], Awaitable[float | None]],
    *,
    swap: bool = True,
    opponents: int | None = None,
) -> list[float | None]:
    """Compare entries pairwise, and return each entry's win rate from 0 to 1.

    Args:
        entries, compare, swap, opponents: see `compare_all`.

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
    return win_rates(len(entries), await compare_all(entries, compare, swap=swap, opponents=opponents))


async def compare_all(
    entries: Sequence[T],
    compare: Callable[[T, T], Awaitable[float | None]],
    *,
    swap: bool = True,
    opponents: int | None = None,
) -> list[Comparison]:
    """Compare entries pairwise, all pairs at the same time.

    The entries form a circle, in which each meets its nearest neighbours. With ``opponents=2, swap=False``, n entries
    need n comparisons.

    Args:
        entries: the entries to compare, for instance the responses of a group.
        compare: returns the result of the first entry against the second: 1 for a win, 0 for a loss, 0.5 for a draw,
            or any number between; ``None`` if the judge's verdict cannot be parsed.
        swap: compare each pair in both orders. This cancels the position bias of judges: an entry that wins in one
            order only has a mean of 0.5 for the pair. Without it, each entry is shown first about as often as second.
        opponents: the number of opponents of each entry, rounded up to an even number; by default all others.

    Returns:
        All comparisons; with ``swap``, the second orders after the first ones.

    Raises:
        ValueError: ``compare`` returned neither ``None`` nor a number from 0 to 1.
        Exception: ``compare`` raised it; the other comparisons are cancelled.
    """
    pairs = _pairs(len(entries), opponents)
    orders = pairs + [(second, first) for first, second in pairs] if swap else pairs
    results = await together(_ask(compare, entries[first], entries[second]) for first, second in orders)
    return [Comparison(first, second, result) for (first, second), result in zip(orders, results, strict=True)]


def win_rates(count: int, comparisons: Iterable[Comparison]) -> list[float | None]:
    """Return the mean result of each entry, from 0 to 1; ``None`` for an entry without a result.

    Args:
        count: the number of entries.
        comparisons: the comparisons of these entries.
    """
    results: list[list[float]] = [[] for _ in range(count)]
    for comparison in comparisons:
        if comparison.result is not None:
            results[comparison.first].append(comparison.result)
            results[comparison.second].append(1.0 - comparison.result)
    return [fmean(own) if own else None for own in results]


def order_flips(count: int, comparisons: Iterable[Comparison]) -> list[float | None]:
    """Return for each entry the share of its pairs that another entry wins if the order is swapped.

    ``None`` for an entry without a pair that was compared in both orders.

    Args:
        count: the number of entries.
        comparisons: the comparisons of these entries.
    """
    known = {(one.first, one.second): one.result for one in comparisons}
    flips: list[list[bool]] = [[] for _ in range(count)]
    for (first, second), result in known.items():
        swapped = known.get((second, first))
        if first < second and result is not None and swapped is not None:
            flipped = (result - 0.5) * (0.5 - swapped) < 0  # a draw in one order is not a flip
            flips[first].append(flipped)
            flips[second].append(flipped)
    return [fmean(own) if own else None for own in flips]


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
    pairs: dict[frozenset[int], tuple[int, int]] = {}
    for step in range(1, distances + 1):
        for i in range(count):
            pair = (i, (i + step) % count)
            pairs.setdefault(frozenset(pair), pair)  # opposite entries meet once
    return list(pairs.values())


async def _ask(compare: Callable[[T, T], Awaitable[float | None]], first: T, second: T) -> float | None:
    result = await compare(first, second)
    if result is None:
        return None
    if not isinstance(result, int | float) or not 0 <= result <= 1:
        raise ValueError(f"compare must return a number from 0 (the second wins) to 1, or None; got {shorten(result)}")
    return float(result)
