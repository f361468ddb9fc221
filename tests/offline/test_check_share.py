"""The formula of the error that spot checks add to advantages, against a simulation with the real function."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest

from reward_loop.client import spot_check
from reward_loop.offline.check_judge import SMALLEST, Gap, advice


async def strong_judge(score: float) -> float:
    return score


async def advantages(group: list[tuple[float, float]], share: float, number: int) -> list[tuple[float, float]]:
    """The advantages of a group, by the rewards of spot checks and by the strong judge."""
    made = [
        (await spot_check(cheap, strong_judge(strong), share, uid=f"{number}_{i}")).score or 0.0
        for i, (cheap, strong) in enumerate(group)
    ]
    strong = [score for _, score in group]
    return [(a - fmean(made), b - fmean(strong)) for a, b in zip(made, strong, strict=True)]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("share", [0.15, 0.2, 0.5])
async def test_the_error_of_advantages_is_that_of_the_formula(size: int, share: float) -> None:
    rng = random.Random(size)

    def drawn() -> tuple[float, float]:
        strong = float(rng.random() < 0.6)
        return (strong if rng.random() < 0.7 else rng.random()), strong

    groups = [[drawn() for _ in range(size)] for _ in range(24000 // size)]
    gap = Gap.of([pair for group in groups for pair in group])
    found = [pair for number, group in enumerate(groups) for pair in await advantages(group, share, number)]
    error = math.sqrt(fmean((made - right) ** 2 for made, right in found))
    assert error == pytest.approx(gap.error(share, size), rel=0.06)
    spread = math.sqrt(fmean(right**2 for _, right in found))
    assert error / spread == pytest.approx(gap.relative_error(share), rel=0.08)
    # The noise of an advantage of the strong judge alone, and of the check, add up.
    total = math.sqrt(fmean(made**2 for made, _ in found))
    assert total / spread == pytest.approx(math.hypot(1, gap.relative_error(share)), rel=0.08)


@pytest.mark.parametrize("most", [0.5, 1.0, 2.0])
def test_the_advised_share_has_the_allowed_error(most: float) -> None:
    gap = Gap(square=0.3, variance=0.24)
    assert gap.share(most) > SMALLEST
    assert gap.relative_error(gap.share(most)) == pytest.approx(most)
    assert Gap(0.001, 0.24).share(most) == SMALLEST
    assert Gap(0.0, 0.24).share(most) == SMALLEST


def test_the_advice_names_what_it_counted() -> None:
    pairs = [(1.0, 0.0)] * 5 + [(1.0, 1.0)] * 5 + [(0.0, 0.0)] * 10
    # 0.25 of the squared gap, and the variance 15 * 5 / 20 / 19: 0.25 * 4 / 0.1974 = 2.25 squared.
    text = advice(pairs, "labelled answers")
    assert text is not None
    assert text.startswith("the judges differ on 5 of 20 labelled answers. Spot checks of 20% of the samples")
    assert "2.3 standard deviations, so a step tells as much as 16% of its samples" in text
    assert "Advised: share=0.25 (1.9 standard deviations" in text


@pytest.mark.parametrize("pairs", [[], [(1.0, 0.0)], [(1.0, 1.0)] * 9])
def test_pairs_that_do_not_tell_give_no_advice(pairs: list[tuple[float, float]]) -> None:
    assert advice(pairs, "answers") is None
