"""Answers with known labels, which a judge scores again and again."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import Field

from reward_loop._util.json import decode, with_bytes
from reward_loop.config import Config, parse
from reward_loop.errors import ConfigError
from reward_loop.types import RewardSample

__all__ = ["LabelledAnswer", "LabelledAnswers"]


class LabelledAnswer(Config):
    """A line of the file of labelled answers: the fields of a sample, and the label."""

    solution_str: str
    """The answer."""

    label: bool
    """Whether a judge should accept the answer."""

    ground_truth: Any = None
    """The reference answer."""

    data_source: str = ""
    """The data set."""

    extra_info: dict[str, Any] = Field(default_factory=dict)
    """Other fields that the function reads."""

    prompt: Any = None
    """The prompt, as text or chat messages."""

    uid: str | None = None
    """The answer's name in records and warnings; by default the number of its line."""


class LabelledAnswers:
    """The labelled answers, when they are due, and their first scores.

    Args:
        path: a file in JSON Lines; each line is a `LabelledAnswer`.
        every: the number of steps from one time to the next.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is invalid.
    """

    def __init__(self, path: str, every: int) -> None:
        where = f"reward_loop.audit.labelled={path}"
        try:
            # Not `splitlines`, which also splits at characters that a JSON text may contain, such as U+2028.
            # `utf-8-sig`: some editors write a mark (BOM) at the beginning of a file.
            lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: {error}") from error
        self.answers: list[tuple[RewardSample, bool]] = []
        for number, line in enumerate(lines, 1):
            if line.strip():
                self.answers.append(_answer(line, f"{where}, line {number}", number))
        if not self.answers:
            raise ConfigError(f"{where}: it has no answers")
        if repeated := [uid for uid, count in Counter(a.uid for a, _ in self.answers).items() if count > 1]:
            raise ConfigError(f"{where}: the uid {repeated[0]!r} occurs more than once")
        self._every = every
        self._next_step: int | None = None
        self._times = 0
        self._first: dict[str, float] = {}

    @property
    def is_first(self) -> bool:
        """Whether the answers have not been due yet."""
        return self._next_step is None

    def due(self, step: int | None, part: tuple[int, int]) -> list[tuple[RewardSample, bool]]:
        """Return the answers to score in a step, in a new order each time; empty if it is not time.

        Without steps they are due once.

        Args:
            step: the training step of the latest sample.
            part: the position of this process, and the number of processes that share the answers.
        """
        if self._next_step is not None and (step or 0) < self._next_step:
            return []
        self._next_step = (step or 0) + self._every
        answers = self.answers[part[0] :: part[1]]
        random.Random(self._times).shuffle(answers)
        self._times += 1
        return answers

    def drift(self, uid: str, score: float) -> float | None:
        """Return the absolute difference of a score to the first score of the answer; ``None`` the first time."""
        if uid in self._first:
            return abs(score - self._first[uid])
        self._first[uid] = score
        return None


def _answer(line: str, where: str, number: int) -> tuple[RewardSample, bool]:
    try:
        fields = with_bytes(decode(line))
    except ValueError as error:
        raise ConfigError(f"{where}: it is not JSON: {error}") from error
    answer = parse(LabelledAnswer, fields, where)
    sample = RewardSample(
        answer.solution_str,
        data_source=answer.data_source,
        ground_truth=answer.ground_truth,
        extra_info=answer.extra_info,
        uid=answer.uid or f"labelled {number}",
        prompt=answer.prompt,
        is_probe=True,
    )
    return sample, answer.label
