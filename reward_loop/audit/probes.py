"""The probes of an answer: what is asked about it again, and why its score should be known; and labelled answers.

A judge scores answers with known labels again and again.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from reward_loop._util.json import decode, with_bytes
from reward_loop.config import AuditConfig, Config, parse
from reward_loop.errors import ConfigError
from reward_loop.types import RewardSample

CANARY, ABLATION = "canary", "ablation"
CANARIES = ("master_key", "empty", "other_answer", "cut_off", "question")
"""The kinds of canaries: answers that are wrong by construction."""

FRAME = "Here is my answer to the question.\n\n"
"""Goes in front of an answer without changing its content."""

KEPT = 0.5
"""The part of an answer that stays if its end is cut off."""

MAX_OTHERS = 64
"""The number of latest answers from which the answer to another question is taken."""

MAX_ACCEPTED = 8
"""The number of latest accepted master keys that are asked more often."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What is asked about an answer again."""

    kind: str
    """``canary``, ``again``, ``frame`` or ``order``; also ``labelled``, ``reference`` and ``ablation``."""
    variant: str = ""
    """Of a canary: one of `CANARIES`. Of an ablation: the name of the feature."""
    answer: str | None = None
    """The answer that is scored in place of the sample's own; ``None`` for the same answer."""
    inserted: bool = False
    """Of an ablation: whether the feature is in this answer, and not in the sample's own."""

    @property
    def name(self) -> str:
        """Kind and variant, as in metrics."""
        return f"{self.kind}/{self.variant}" if self.variant else self.kind


class Probes:
    """Chooses probes. The kinds take turns; a kind that does not apply to a sample is passed over.

    Args:
        options: the kinds and the master keys.
        in_groups: whether samples are scored in groups; only then the order of answers can be reversed.
        generator: chooses the first kind and the first master key.
    """

    def __init__(self, options: AuditConfig, in_groups: bool, generator: random.Random) -> None:
        # Each process begins elsewhere, so that few probes of many processes are of all kinds.
        self._kinds = deque(kind for kind in options.probes if kind != "order" or in_groups)
        self._kinds.rotate(generator.randrange(len(self._kinds) or 1))
        self._keys = deque(options.keys)
        self._keys.rotate(generator.randrange(len(self._keys)))
        self._accepted: deque[str] = deque(maxlen=MAX_ACCEPTED)
        self._repeats_key = False
        self._others: deque[RewardSample] = deque(maxlen=MAX_OTHERS)

    def remember(self, sample: RewardSample) -> None:
        """Keep a sample, whose answer is a wrong one for other questions."""
        self._others.append(sample)

    def choose(self, sample: RewardSample) -> Probe | None:
        """Return the next probe that applies to a sample; ``None`` if there is none."""
        for _ in range(len(self._kinds)):
            kind = self._kinds[0]
            self._kinds.rotate(-1)
            if kind not in CANARIES:
                return Probe(kind, answer=FRAME + sample.solution_str if kind == "frame" else None)
            answer = self._canary(kind, sample)
            if answer is not None and answer != sample.solution_str:
                return Probe(CANARY, kind, answer)
        return None

    def ended(self, probe: Probe, accepted: bool) -> None:
        """Record whether the judge accepted a canary. Every second master key is one that it has accepted lately."""
        if probe.variant != "master_key" or probe.answer is None:
            return
        if accepted:
            self._accepted.append(probe.answer)
        elif probe.answer in self._accepted:
            self._accepted.remove(probe.answer)

    def _canary(self, variant: str, sample: RewardSample) -> str | None:
        match variant:
            case "master_key":
                return self._key()
            case "empty":
                return ""
            case "other_answer":
                others = (other for other in reversed(self._others) if _is_another_question(other, sample))
                return next((other.solution_str for other in others), None)
            case "cut_off":
                return sample.solution_str[: int(len(sample.solution_str) * KEPT)] or None
            case _:
                return question_of(sample.prompt)

    def _key(self) -> str:
        self._repeats_key = not self._repeats_key and bool(self._accepted)
        if self._repeats_key:
            self._accepted.rotate(1)
            return self._accepted[0]
        self._keys.rotate(-1)
        return self._keys[0]


def question_of(prompt: Any) -> str | None:
    """Return the text of a prompt: the prompt itself, or the user's last message; ``None`` if there is no text."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Iterable):
        return None
    messages = [message for message in prompt if isinstance(message, Mapping) and message.get("role") == "user"]
    text = messages[-1].get("content") if messages else None
    return text if isinstance(text, str) else None


def _is_another_question(other: RewardSample, sample: RewardSample) -> bool:
    """Return whether two samples are known to have different questions, with different reference answers if any."""
    pairs = [(_text(other.ground_truth), _text(sample.ground_truth)), (other.group, sample.group)]
    pairs.append((question_of(other.prompt), question_of(sample.prompt)))
    known = [first != second for first, second in pairs if first is not None and second is not None]
    return bool(known) and all(known)


def _text(truth: Any) -> str | None:
    return None if truth is None else str(truth)


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
    answer = dict(parse(LabelledAnswer, fields, where))
    label = answer.pop("label")
    answer["uid"] = answer["uid"] or f"labelled {number}"
    return RewardSample(**answer, is_probe=True), label
