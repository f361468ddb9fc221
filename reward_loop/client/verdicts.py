"""How a judge's verdict is read from its reply.

The last verdict counts: a judge may quote the response that it judges, and with it a verdict that the response made up.
A last verdict that cannot be read is none; no earlier one takes its place. Nothing is evaluated.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from reward_loop._util.text import listing, shorten
from reward_loop.errors import ConfigError

__all__ = ["Choice", "Json", "NoVerdictError", "Number", "Verdict"]

# What models put around a verdict: spaces, emphasis, quotes, brackets, TeX's box.
_AROUND = r"(?:[\s*_\"'`(\[]|\\boxed\{|\\text\{)*"
_NUMBER = r"([-+]?\d++(?:\.\d++)?+(?:[eE][-+]?\d++)?+)"
# What must not follow a number, or it was only a part of what is meant: 1,000, 7-8, 70 %, 7/x.
_WHOLE = r"(?!\w|[.,]\d|\s*[-\u2013/]\s*\w|\s*%)"


class NoVerdictError(ValueError):
    """There is no verdict in the reply."""


class Verdict(Protocol):
    """A kind of verdict."""

    request: Mapping[str, Any]
    """Fields of the request that have the server write such a verdict."""

    def read(self, reply: str) -> tuple[Any, float]:
        """Return the verdict, and its score.

        Raises:
            NoVerdictError: there is none.
        """


class Number:
    """A number in a range, such as ``Score: 7`` or ``Score: 7/10``. It is the score."""

    request: Mapping[str, Any] = {}

    def __init__(self, low: float, high: float, *, after: str | None = "Score:") -> None:
        """Say what the judge was asked for.

        Args:
            low: the least number that is a verdict.
            high: the greatest; a number that is given as ``7/10`` counts only if it is out of this.
            after: what stands before it, without regard to case, spaces and emphasis; ``None`` where the reply's last
                line is the number alone.
        """
        if not low < high:
            raise ConfigError(f"Number({low}, {high}): the range must go upwards")
        self.low, self.high, self.after = low, high, after

    def read(self, reply: str) -> tuple[float, float]:
        """Return the number, twice."""
        place = _place(reply, self.after)
        found = re.match(rf"{_AROUND}{_NUMBER}(?:\s*/\s*(\d++(?:\.\d++)?+))?+{_WHOLE}", place)
        if found is None or (self.after is None and found.end() < len(place)):
            raise NoVerdictError(f"there is no single number {_where(self.after)}: {shorten(place[:80])}")
        number = float(found[1])
        if found[2] is not None and float(found[2]) != self.high:
            raise NoVerdictError(f"the number is out of {found[2]}, not out of {self.high:g}: {shorten(place[:80])}")
        if not self.low <= number <= self.high:
            raise NoVerdictError(f"{found[1]} is not between {self.low:g} and {self.high:g}")
        return number, number


class Choice:
    """One of a set of words, such as ``Verdict: correct``, or ``[[A]]`` with ``after="[["``."""

    request: Mapping[str, Any] = {}

    def __init__(self, scores: Mapping[str, float], *, after: str | None = "Verdict:") -> None:
        """Say what the judge was asked for.

        Args:
            scores: the words, and the score of each. Case does not matter.
            after: what stands before it, without regard to case, spaces and emphasis; ``None`` where the reply's last
                line is the word alone.
        """
        self._scores = {_squeezed(choice): (choice, float(score)) for choice, score in scores.items()}
        if not scores or len(self._scores) < len(scores) or "" in self._scores:
            raise ConfigError(f"Choice({dict(scores)}): name the words, each once")
        self.after = after
        # The longest first, as one may be the beginning of another.
        words = sorted(self._scores, key=len, reverse=True)
        either = "|".join(r"\s+".join(map(re.escape, word.split())) for word in words)
        self._pattern = re.compile(rf"{_AROUND}({either})(?!\w|-\w)", re.IGNORECASE)

    def read(self, reply: str) -> tuple[str, float]:
        """Return the word, as it was given, and its score."""
        place = _place(reply, self.after)
        found = self._pattern.match(place)
        if found is None or (self.after is None and found.end() < len(place)):
            known = listing(choice for choice, _ in self._scores.values())
            raise NoVerdictError(f"none of {known} stands {_where(self.after)}: {shorten(place[:80])}")
        return self._scores[_squeezed(found[1])]


class Json:
    """A JSON object, such as ``{"reason": "...", "score": 7}``, of a schema that pydantic checks."""

    def __init__(self, schema: Any, *, score: str = "score", enforce: bool = False) -> None:
        """Say what the judge was asked for.

        Args:
            schema: a pydantic model, a dataclass, or whatever else pydantic's ``TypeAdapter`` takes.
            score: which of its fields is the score.
            enforce: have the server write nothing else, by ``response_format``; vLLM, SGLang and OpenAI can. A server
                that cannot, such as the embedded one, answers with status 400.
        """
        self._adapter: TypeAdapter[Any] = TypeAdapter(schema)
        self._field = score
        self.request: Mapping[str, Any] = {}
        if enforce:
            form = {"name": getattr(schema, "__name__", "verdict"), "schema": self._adapter.json_schema()}
            self.request = {"response_format": {"type": "json_schema", "json_schema": form}}

    def read(self, reply: str) -> tuple[Any, float]:
        """Return the object, as plain containers, and its score."""
        found = _last_object(reply)
        if found is None:
            raise NoVerdictError("there is no JSON object in it")
        try:
            checked = self._adapter.dump_python(self._adapter.validate_python(found), mode="json")
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, problem["loc"]))
            raise NoVerdictError(f"the JSON object does not fit: {where}: {problem['msg']}") from None
        score = checked.get(self._field) if isinstance(checked, Mapping) else None
        if not isinstance(score, int | float) or not abs(score) <= sys.float_info.max:
            raise NoVerdictError(f"its {self._field!r} is {shorten(score)}, which is no number")
        return checked, float(score)


def _place(reply: str, after: str | None) -> str:
    """What follows the last ``after``; or the last line, if it is the verdict alone."""
    if after is None:
        lines = [line.strip(" \t*_\"'`.!()[]") for line in reply.splitlines() if line.strip()]
        return lines[-1] if lines else ""
    parts = re.findall(r"\w+|[^\w\s]", after)
    pattern = r"[\s*_\"'`]*".join(map(re.escape, parts))
    ends = [found.end() for found in re.finditer(pattern, reply, re.IGNORECASE)]
    if not ends:
        raise NoVerdictError(f"there is no {after!r} in it")
    return reply[ends[-1] :]


def _where(after: str | None) -> str:
    return "alone in the last line" if after is None else f"after the last {after!r}"


def _squeezed(text: str) -> str:
    return " ".join(text.split()).lower()


def _last_object(text: str) -> Any:
    """The last JSON object that is not inside of another."""
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
