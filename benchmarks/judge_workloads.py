"""The requests of judges in `benchmarks.affinity`: what their prompts share, and how long they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from string import ascii_lowercase
from typing import NamedTuple

__all__ = ["WORKLOADS", "Prompt", "Segment", "Sizes", "Unit", "text_of", "units"]


class Segment(NamedTuple):
    """A part of a prompt: equal names have equal texts."""

    name: str
    tokens: int


Prompt = tuple[Segment, ...]


def text_of(prompt: Prompt) -> str:
    """Return the text of a prompt: one letter for each token, as in the byte-level tokenizer of the tiny model."""
    return "".join(_letters(segment) for segment in prompt)


@lru_cache(maxsize=4096)
def _letters(segment: Segment) -> str:
    return "".join(random.Random(segment.name).choices(ascii_lowercase, k=segment.tokens))


@dataclass(frozen=True)
class Unit:
    """What is judged at a time: a response, or in a tournament a group. Its requests are sent at the same time."""

    group: str
    prompts: list[Prompt]
    replies: list[int]
    """The length of each reply, in tokens."""


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens; those of answers and replies are means."""

    template: int = 100
    question: int = 300
    answer: int = 1500
    criterion: int = 50
    reply: int = 80
    responses: int = 8
    criteria: int = 8
    opponents: int = 4


class Group:
    """The responses to a question; the lengths of answers and replies vary."""

    def __init__(self, seed: str, number: int, sizes: Sizes, rng: random.Random) -> None:
        self.name = name = f"{seed}.{number}"
        self.sizes, self._rng = sizes, rng
        self.begin = (Segment(f"{seed}.template", sizes.template), Segment(f"{name}.question", sizes.question))
        self.criteria = [Segment(f"{seed}.criterion {i}", sizes.criterion) for i in range(sizes.criteria)]
        self.answers = [Segment(f"{name}.{i}", self._uneven(sizes.answer)) for i in range(sizes.responses)]

    def _uneven(self, mean: int) -> int:
        return max(8, min(round(mean * self._rng.lognormvariate(-0.125, 0.5)), 2 * mean))

    def unit(self, prompts: list[Prompt], reply: int | None = None) -> Unit:
        return Unit(self.name, prompts, [self._uneven(reply or self.sizes.reply) for _ in prompts])


def pointwise(group: Group) -> list[Unit]:
    return [group.unit([(*group.begin, answer)]) for answer in group.answers]


def rubric(group: Group, *, criterion_first: bool = False) -> list[Unit]:
    if criterion_first:
        return [group.unit([(one, *group.begin, answer) for one in group.criteria]) for answer in group.answers]
    return [group.unit([(*group.begin, answer, one) for one in group.criteria]) for answer in group.answers]


def tournament(group: Group) -> list[Unit]:
    answers = group.answers
    near = [(i, (i + j) % len(answers)) for j in range(1, group.sizes.opponents // 2 + 1) for i in range(len(answers))]
    pairs = [pair for first, second in near for pair in ((first, second), (second, first))]
    return [group.unit([(*group.begin, answers[first], answers[second]) for first, second in pairs])]


def unshared(group: Group) -> list[Unit]:
    """One response to each question, and a reasoning judge, whose replies are long."""
    question = Segment(f"{group.name}.question", group.sizes.question)
    return [group.unit([(question, group.answers[0])], reply=5 * group.sizes.reply)]


WORKLOADS: dict[str, Callable[[Group], list[Unit]]] = {
    "rubric": rubric,
    "rubric, criterion first": partial(rubric, criterion_first=True),
    "tournament": tournament,
    "pointwise": pointwise,
    "nothing shared": unshared,
}


def units(workload: str, groups: int, sizes: Sizes, seed: str) -> list[Unit]:
    """Return the units of some groups, in the order in which the responses are generated: eight groups at a time."""
    rng = random.Random(seed)
    made = [WORKLOADS[workload](Group(seed, i, sizes, rng)) for i in range(groups)]
    ordered: list[Unit] = []
    for i in range(0, groups, 8):
        some = [unit for group in made[i : i + 8] for unit in group]
        rng.shuffle(some)
        ordered += some
    return ordered
