"""Requests of a judge for a group against the rank correlation of its scores with the true quality of the responses.

    python -m benchmarks.ranking [--responses N] [--groups N] [--bias B] [--seed N]

The judge is simulated. The quality of a response is drawn from a standard normal distribution. In each request, the
judge sees the quality of each response with normal noise. It prefers the first place: when it compares two responses,
the bias is added to the first one; in a list, the added bias falls linearly to 0 at the last place. Ratings of single
responses have no bias; they are rounded to a scale of 1 to 10. The columns are standard deviations of the noise. The
scores are computed with `reward_loop.scoring`, as in `judge:pairwise`. The correlation is Spearman's, the mean over
all groups. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from rich.console import Console
from rich.table import Table

from reward_loop.scoring import compare_all, order_flips, ranking, win_rates

NOISE = (0.25, 0.5, 1.0)


@dataclass
class SimulatedJudge:
    """A judge with known noise and position bias, which counts its requests and the pairs that it flips."""

    noise: float
    bias: float
    random: random.Random
    requests: int = 0
    flips: list[float] = field(default_factory=list)

    def sees(self, quality: float) -> float:
        return quality + self.random.gauss(0, self.noise)

    async def compare(self, first: float, second: float) -> float:
        self.requests += 1
        return float(self.sees(first) + self.bias > self.sees(second))

    async def pairs(self, group: list[float], opponents: int | None, both_orders: bool) -> list[float | None]:
        compared = await compare_all(group, self.compare, swap=both_orders, opponents=opponents)
        self.flips += [share for share in order_flips(len(group), compared) if share is not None]
        return win_rates(len(group), compared)

    async def order(self, group: list[float]) -> list[float]:
        self.requests += 1
        last = max(1, len(group) - 1)
        seen = [self.sees(quality) + self.bias * (1 - place / last) for place, quality in enumerate(group)]
        return ranking(sorted(range(len(group)), key=seen.__getitem__, reverse=True))

    async def rate(self, group: list[float]) -> list[float]:
        self.requests += len(group)
        return [min(10, max(1, round(5.5 + 1.5 * self.sees(quality)))) for quality in group]


Method = Callable[[SimulatedJudge, list[float]], Awaitable[list[float]]]

METHODS: dict[str, Method] = {
    "opponents=null": lambda judge, group: judge.pairs(group, None, True),
    "opponents=4 (the default)": lambda judge, group: judge.pairs(group, 4, True),
    "opponents=null both_orders=false": lambda judge, group: judge.pairs(group, None, False),
    "opponents=4 both_orders=false": lambda judge, group: judge.pairs(group, 4, False),
    "opponents=2 both_orders=false (a circle)": lambda judge, group: judge.pairs(group, 2, False),
    "listwise=true": lambda judge, group: judge.order(group),
    "judge:panel with one judge": lambda judge, group: judge.rate(group),
}
"""The arguments of ``judge:pairwise``, and how it computes the scores; the last one rates each response alone."""


def ranks(values: list[float]) -> list[float]:
    """Return the rank of each value; equal values have their mean rank."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def correlation(one: list[float], other: list[float]) -> float:
    """Return Spearman's rank correlation; 0 if all values of a list are equal."""
    first, second = ranks(one), ranks(other)
    spread = pstdev(first) * pstdev(second)
    covariance = fmean(a * b for a, b in zip(first, second, strict=True)) - fmean(first) * fmean(second)
    return covariance / spread if spread else 0.0


async def measure(
    method: Method, noise: float, bias: float, responses: int, groups: int, seed: int
) -> dict[str, float]:
    """Return the requests for a group, the rank correlation, and the share of pairs that the order decides."""
    judge = SimulatedJudge(noise, bias, random.Random(seed))
    draw = random.Random(seed + 1)
    found = []
    for _ in range(groups):
        group = [draw.gauss(0, 1) for _ in range(responses)]
        found.append(correlation(group, await method(judge, group)))
    flips = {"order_flips": round(fmean(judge.flips), 3)} if judge.flips else {}
    return {"requests": judge.requests / groups, "correlation": round(fmean(found), 3), **flips}


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.ranking", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--responses", type=int, default=8, help="responses in a group (8)")
    parser.add_argument("--groups", type=int, default=500, help="groups (500)")
    parser.add_argument("--bias", type=float, default=0.5, help="the judge's bias for the first place (0.5)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of qualities and noise (0)")
    args = parser.parse_args()

    table = Table("", "requests", *(f"noise {noise:g}" for noise in NOISE), box=None, padding=(0, 2, 0, 0))
    figures = {}
    for name, method in METHODS.items():
        by_noise = {
            noise: asyncio.run(measure(method, noise, args.bias, args.responses, args.groups, args.seed))
            for noise in NOISE
        }
        requests = next(iter(by_noise.values()))["requests"]
        table.add_row(name, f"{requests:g}", *(f"{found['correlation']:.2f}" for found in by_noise.values()))
        figures[name] = {f"noise {noise:g}": found for noise, found in by_noise.items()}
    Console(width=100).print(table)
    print(json.dumps({"responses": args.responses, "groups": args.groups, "bias": args.bias, "methods": figures}))


if __name__ == "__main__":
    main()
