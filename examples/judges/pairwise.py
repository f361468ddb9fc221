"""A judge that compares the responses of a group: the score of a response is its share of wins, from 0 to 1.

    reward-loop score examples/judges/pairwise.py:Pairwise FILE -o pairwise --manager group --router-address HOST:PORT

The manager `group` calls it once for all responses to a prompt. The mean of a group is always about 0.5, so these
rewards do not show whether the policy improves: watch a second measure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from reward_loop.client import Choice, Judge

T = TypeVar("T")

PROMPT = """Question:
{{question}}

The first answer:
{{first}}

The second answer:
{{second}}

Which answer is better? Compare the answers in two sentences. Neither their length nor their order matters. End with \
`[[A]]` if the first is better, `[[B]]` if the second is better, or `[[tie]]`."""


class Pairwise:
    """Compares the responses of a group with each other."""

    def __init__(self, *, opponents: int | None = 4, both_orders: bool = True, **options: Any) -> None:
        """Create the judge.

        Args:
            opponents: the number of other responses that each one is compared with, rounded up to an even number;
                ``None`` for all. 2 is a circle.
            both_orders: compare each pair in both orders, which cancels the position bias of the judge. Otherwise each
                response is shown first about as often as second.
            options: options of `Judge`, such as ``model`` and ``address``.
        """
        self.opponents, self.both_orders = opponents, both_orders
        better = Choice({"A": 1.0, "B": 0.0, "tie": 0.5}, after="[[")
        self.judge = Judge(PROMPT, better, fence=["first", "second"], **{"attempts": 3, "max_tokens": 1024, **options})
        self.has_address = "address" in options

    async def compute_score(
        self, solution_strs: list[str], extra_infos: list[dict[str, Any]], reward_router_address: str | None = None
    ) -> list[dict[str, Any]]:
        """Return the score of each response; a response without any verdict is unscored.

        Also ``order_flips``: the share of its pairs that another response wins if the order is swapped; and
        ``first_wins``: the share of wins of the answer shown first, in the whole group. 0.5 is without position bias.
        """
        router = None if self.has_address else reward_router_address
        question = extra_infos[0]["question"]  # the responses of a group have one prompt

        async def better(first: str, second: str) -> float | None:
            return (await self.judge(router, question=question, first=first, second=second)).score

        compared = await compare_all(solution_strs, better, swap=self.both_orders, opponents=self.opponents)
        won_first = [one.result for one in compared if one.result is not None]
        shared = {"first_wins": fmean(won_first)} if won_first else {}
        count = len(solution_strs)
        return [
            {"score": score, **shared, **({} if flips is None else {"order_flips": flips})}
            for score, flips in zip(win_rates(count, compared), order_flips(count, compared), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of one comparison of two entries."""

    first: int
    """The index of the entry that was shown first."""
    second: int
    """The index of the entry that was shown second."""
    result: float | None
    """1 if the first entry wins, 0 if it loses, or a number between; ``None`` if the verdict cannot be read."""


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
            or any number between; ``None`` if the judge's verdict cannot be read.
        swap: compare each pair in both orders: an entry that wins in one order only has a mean of 0.5 for the pair.
        opponents: the number of opponents of each entry, rounded up to an even number; by default all others.
    """
    pairs = _pairs(len(entries), opponents)
    orders = pairs + [(second, first) for first, second in pairs] if swap else pairs
    results = await asyncio.gather(*(compare(entries[first], entries[second]) for first, second in orders))
    return [Comparison(first, second, result) for (first, second), result in zip(orders, results, strict=True)]


def win_rates(count: int, comparisons: Iterable[Comparison]) -> list[float | None]:
    """Return the mean result of each of ``count`` entries, from 0 to 1; ``None`` for an entry without a result."""
    results: list[list[float]] = [[] for _ in range(count)]
    for comparison in comparisons:
        if comparison.result is not None:
            results[comparison.first].append(comparison.result)
            results[comparison.second].append(1.0 - comparison.result)
    return [fmean(own) if own else None for own in results]


def order_flips(count: int, comparisons: Iterable[Comparison]) -> list[float | None]:
    """Return for each of ``count`` entries the share of its pairs that another entry wins if the order is swapped.

    ``None`` for an entry without a pair that was compared in both orders. A draw in one order is not a flip.
    """
    known = {(one.first, one.second): one.result for one in comparisons}
    flips: list[list[bool]] = [[] for _ in range(count)]
    for (first, second), result in known.items():
        swapped = known.get((second, first))
        if first < second and result is not None and swapped is not None:
            flipped = (result - 0.5) * (0.5 - swapped) < 0
            flips[first].append(flipped)
            flips[second].append(flipped)
    return [fmean(own) if own else None for own in flips]


def _pairs(count: int, opponents: int | None) -> list[tuple[int, int]]:
    """Return the pairs to compare. In a circle of all entries, each meets its neighbours up to a fixed distance."""
    distances = count // 2 if opponents is None else min(count // 2, (opponents + 1) // 2)
    pairs: dict[frozenset[int], tuple[int, int]] = {}
    for step in range(1, distances + 1):
        for i in range(count):
            pair = (i, (i + step) % count)
            pairs.setdefault(frozenset(pair), pair)  # opposite entries meet once
    return list(pairs.values())
