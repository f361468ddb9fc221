"""Verdict formats: parsers that read a judge's verdict and score from its reply.

Only the last verdict in the reply counts: a judge may quote the response, which may contain a forged verdict. If the
last verdict is invalid, the reply has no verdict; earlier ones are not used. No text is evaluated as code.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, Protocol

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from reward_loop._util.text import listing, shorten
from reward_loop.errors import ConfigError

__all__ = ["Choice", "Json", "NoVerdictError", "Number", "Order", "Pattern", "Ratings", "Verdict"]

# What models write before a verdict: spaces, emphasis, quotes, opening brackets, TeX's \boxed{.
_AROUND = r"(?:[\s*_\"'`(\[]|\\boxed\{|\\text\{)*"
_IGNORED = " \t\r*_\"'`.!()[]"
_NUMBER = r"([-+]?\d++(?:\.\d++)?+(?:[eE][-+]?\d++)?+)"
# Rejects a number that is only part of an expression: 1,000, 7-8, 70 %, 7/x.
_WHOLE = r"(?!\w|[.,]\d|\s*[-\u2013/]\s*\w|\s*%)"


class NoVerdictError(ValueError):
    """The reply contains no valid verdict."""


class Verdict(Protocol):
    """A verdict format."""

    request: Mapping[str, Any]
    """Fields to add to the request, for example to make the server write this format."""

    def read(self, reply: str) -> tuple[Any, float | None]:
        """Return the verdict and its score; ``None`` if such a verdict has no score.

        Raises:
            NoVerdictError: the reply contains no valid verdict.
        """


class Number:
    """A number in a range, such as ``Score: 7`` or ``Score: 7/10``; the number is the score, or scaled to 0..1."""

    request: Mapping[str, Any] = {}

    def __init__(self, low: float, high: float, *, after: str | None = "Score:", scaled: bool = False) -> None:
        """Define the format.

        Args:
            low: the smallest valid number.
            high: the largest valid number; also the only valid denominator in ``7/10``.
            after: the text before the number; case, spaces and emphasis are ignored. ``None`` if the last line of the
                reply must contain only the number.
            scaled: whether the score is the number scaled linearly: `low` becomes 0, and `high` becomes 1. The verdict
                is the number as the judge wrote it.

        Raises:
            ConfigError: `low` is not less than `high`.
        """
        if not low < high:
            raise ConfigError(f"Number({low}, {high}): the first bound must be below the second")
        self.low, self.high, self.after, self.scaled = low, high, after, scaled

    def read(self, reply: str) -> tuple[float, float]:
        """Return the number, and its score."""
        return self.locate(reply)[1:]

    def locate(self, reply: str) -> tuple[int, float, float]:
        """Return the position of the number in the reply, the number, and its score."""
        start, place = _place(reply, self.after)
        found = re.match(rf"{_AROUND}{_NUMBER}(?:\s*/\s*(\d++(?:\.\d++)?+))?+{_WHOLE}", place)
        if found is None or (self.after is None and found.end() < len(place)):
            raise NoVerdictError(f"there is no single number {_where(self.after)}: {shorten(place[:80])}")
        number = float(found[1])
        if found[2] is not None and float(found[2]) != self.high:
            raise NoVerdictError(f"the number is out of {found[2]}, not out of {self.high:g}: {shorten(place[:80])}")
        if not self.low <= number <= self.high:
            raise NoVerdictError(f"{found[1]} is not between {self.low:g} and {self.high:g}")
        return start + found.start(1), number, self._score(number)

    @property
    def words(self) -> dict[str, float]:
        """The digits that may be the verdict, with their scores.

        Raises:
            ConfigError: the bounds are not digits.
        """
        if self.low < 0 or self.high > 9 or self.low % 1 or self.high % 1:
            raise ConfigError(
                f"Number({self.low:g}, {self.high:g}): expected scores need digits, from 0 to 9 at most: the "
                "probability of a longer number is not in one token"
            )
        return {str(number): self._score(number) for number in range(int(self.low), int(self.high) + 1)}

    def _score(self, number: float) -> float:
        return (number - self.low) / (self.high - self.low) if self.scaled else number


class Choice:
    """One of a set of words, such as ``Verdict: correct``, or ``[[A]]`` with ``after="[["``."""

    request: Mapping[str, Any] = {}

    def __init__(self, scores: Mapping[str, float], *, after: str | None = "Verdict:") -> None:
        """Define the format.

        Args:
            scores: the score of each word. Case is ignored.
            after: the text before the word; case, spaces and emphasis are ignored. ``None`` if the last line of the
                reply must contain only the word.

        Raises:
            ConfigError: there are no words, a word is empty, or two words differ only in case or spaces.
        """
        known = {_squeezed(choice): (choice, float(score)) for choice, score in scores.items()}
        if not scores or len(known) < len(scores) or "" in known:
            raise ConfigError(f"Choice({dict(scores)}): name the words, each once")
        self.after = after
        # The longest word first, because one word may be the beginning of another.
        words = sorted(known, key=len, reverse=True)
        self._choices = [known[word] for word in words]
        # One group for each word: the text found may not be the word in lower case, since re ignores more differences.
        either = "|".join("(" + r"\s+".join(map(re.escape, word.split())) + ")" for word in words)
        self._pattern = re.compile(rf"{_AROUND}(?:{either})(?!\w|-\w)", re.IGNORECASE)

    def read(self, reply: str) -> tuple[str, float]:
        """Return the word, as written in `scores`, and its score."""
        return self.locate(reply)[1:]

    def locate(self, reply: str) -> tuple[int, str, float]:
        """Return the position of the word in the reply, the word, and its score."""
        start, place = _place(reply, self.after)
        found = self._pattern.match(place)
        if found is None or (self.after is None and found.end() < len(place)):
            known = listing(choice for choice, _ in self._choices)
            raise NoVerdictError(f"none of {known} stands {_where(self.after)}: {shorten(place[:80])}")
        assert found.lastindex is not None
        return start + found.start(found.lastindex), *self._choices[found.lastindex - 1]

    @property
    def words(self) -> dict[str, float]:
        """The words, with their scores."""
        return dict(self._choices)


class Pattern:
    """What a regular expression finds, such as ``Pattern(r"<grade>(\\w+)</grade>", {"good": 1, "bad": 0})``."""

    request: Mapping[str, Any] = {}

    def __init__(self, pattern: str, scores: Mapping[str, float] | None = None) -> None:
        """Define the format.

        Args:
            pattern: the regular expression. Its first group is the verdict; without a group, the whole match. The last
                match in the reply counts. It runs on the event loop: avoid nested repetitions such as ``(a+)+``.
            scores: the score of each verdict; spaces around it and case are ignored. By default the verdict is a
                number, which is the score.

        Raises:
            ConfigError: the expression is invalid.
        """
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"Pattern({pattern!r}) is not a valid regular expression: {error}") from None
        self._scores = None if scores is None else {_squeezed(word): float(score) for word, score in scores.items()}

    def read(self, reply: str) -> tuple[str, float]:
        """Return the text that was found, and its score."""
        matches = deque(self._pattern.finditer(reply), maxlen=1)
        if not matches:
            raise NoVerdictError(f"nothing in it matches {self._pattern.pattern!r}")
        found = matches[0]
        verdict = (found[1] if self._pattern.groups else found[0]) or ""
        try:
            score = float(verdict) if self._scores is None else self._scores[_squeezed(verdict)]
        except (KeyError, ValueError):
            known = "a number" if self._scores is None else f"one of {listing(self._scores)}"
            raise NoVerdictError(f"{shorten(verdict)} is not {known}") from None
        if not abs(score) <= sys.float_info.max:
            raise NoVerdictError(f"{shorten(verdict)} is not a finite number")
        return verdict, score


class Json:
    """A JSON object, such as ``{"reason": "...", "score": 7}``, validated with pydantic."""

    def __init__(self, schema: Any, *, score: str = "score", enforce: bool = False) -> None:
        """Define the format.

        Args:
            schema: a pydantic model, a dataclass, or another type that pydantic's ``TypeAdapter`` supports.
            score: the name of the field with the score.
            enforce: restrict the output of the server to the schema, with ``response_format``. vLLM, SGLang and OpenAI
                support it; a server that does not, such as the embedded one, answers with status 400.
        """
        self._adapter: TypeAdapter[Any] = TypeAdapter(schema)
        self._field = score
        self.request: Mapping[str, Any] = {}
        if enforce:
            form = {"name": getattr(schema, "__name__", "verdict"), "schema": self._adapter.json_schema()}
            self.request = {"response_format": {"type": "json_schema", "json_schema": form}}

    def read(self, reply: str) -> tuple[Any, float]:
        """Return the validated object, as dicts, lists and scalars, and its score."""
        checked = self._object(reply)
        score = checked.get(self._field) if isinstance(checked, Mapping) else None
        if not isinstance(score, int | float) or not abs(score) <= sys.float_info.max:
            raise NoVerdictError(f"its {self._field!r} is {shorten(score)}, which is not a number")
        return checked, float(score)

    def _object(self, reply: str) -> Any:
        found = _last_object(reply)
        if found is None:
            raise NoVerdictError("there is no JSON object in it")
        try:
            return self._adapter.dump_python(self._adapter.validate_python(found), mode="json")
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, problem["loc"]))
            raise NoVerdictError(f"the JSON object does not fit: {where}: {problem['msg']}") from None


class Ratings(Json):
    """A rating of each of several criteria, such as ``{"correct": 7, "clear": 9}``; the score is their weighted sum.

    Ratings are scaled to 0..1, and the sum is divided by the sum of the positive weights. So the score is from 0 to 1;
    criteria with a negative weight, for faults, can lower it below 0.
    """

    def __init__(
        self, weights: Mapping[str, float], low: float = 1, high: float = 10, *, enforce: bool = False
    ) -> None:
        """Define the format.

        Args:
            weights: the weight of each criterion, by its name.
            low: the lowest rating.
            high: the highest rating.
            enforce: see `Json`.

        Raises:
            ConfigError: no weight is positive, or `low` is not less than `high`.
        """
        if not low < high:
            raise ConfigError(f"Ratings: the lowest rating {low:g} must be below the highest, {high:g}")
        self._positive = sum(weight for weight in weights.values() if weight > 0)
        if not self._positive or not all(map(math.isfinite, weights.values())):
            raise ConfigError(f"Ratings({dict(weights)}): the weights must be finite, and at least one positive")
        rating = Annotated[float, Field(ge=low, le=high)]
        schema = TypedDict("Ratings", dict.fromkeys(weights, rating))  # type: ignore[misc]
        super().__init__(schema, enforce=enforce)
        self.weights, self.low, self.high = dict(weights), low, high

    def read(self, reply: str) -> tuple[dict[str, float], float]:
        """Return the ratings, scaled to 0..1, and their weighted sum."""
        ratings = {name: (given - self.low) / (self.high - self.low) for name, given in self._object(reply).items()}
        return ratings, self.weigh(ratings)

    def weigh(self, ratings: Mapping[str, float]) -> float:
        """Return the weighted sum of ratings from 0 to 1, divided by the sum of the positive weights."""
        return sum(self.weights[name] * rating for name, rating in ratings.items()) / self._positive


class Order:
    """An order of numbered responses, best first, such as ``Ranking: 3 > 1 > 2``. It has no score: see `ranking`."""

    request: Mapping[str, Any] = {}

    def __init__(self, count: int, *, after: str = "Ranking:") -> None:
        """Define the format.

        Args:
            count: the number of responses, which are numbered from 1.
            after: the text before the order; case, spaces and emphasis are ignored.
        """
        self._count, self._after = count, after

    def read(self, reply: str) -> tuple[list[int], None]:
        """Return the indices of the responses, from 0, best first."""
        line = _place(reply, self._after)[1].strip().partition("\n")[0]
        found = re.findall(r"\d+", line)
        known = {str(index + 1): index for index in range(self._count)}
        if sorted(found) != sorted(known):
            raise NoVerdictError(f"{shorten(line)} does not contain each number from 1 to {self._count} once")
        return [known[number] for number in found], None


def _place(reply: str, after: str | None) -> tuple[int, str]:
    """Return the position and the text after the last occurrence of `after`; if it is ``None``, of the last line."""
    if after is None:
        lines = [line for line in re.finditer(r".+", reply) if line[0].strip()]
        line = lines[-1][0] if lines else ""
        stripped = line.lstrip(_IGNORED)
        return (lines[-1].start() if lines else 0) + len(line) - len(stripped), stripped.rstrip(_IGNORED)
    parts = re.findall(r"\w+|[^\w\s]", after)
    pattern = r"[\s*_\"'`]*".join(map(re.escape, parts))
    ends = [found.end() for found in re.finditer(pattern, reply, re.IGNORECASE)]
    if not ends:
        raise NoVerdictError(f"there is no {after!r} in it")
    return ends[-1], reply[ends[-1] :]


def _where(after: str | None) -> str:
    return "alone in the last line" if after is None else f"after the last {after!r}"


def _squeezed(text: str) -> str:
    return " ".join(text.split()).lower()


def _last_object(text: str) -> Any:
    """Return the last JSON object that is not nested in another, or ``None``."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    found, start = None, text.find("{")
    while start >= 0:
        try:
            found, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
