"""Verdict formats: what a judge's verdict looks like, its score, and the contract by which it is read from a reply.

The contract does not interpret prose:

- Only the text after the last end of reasoning counts. A reply that ends in reasoning has no such text.
- Its last line is the marker and the value, such as ``Score: 7`` or ``<verdict>7</verdict>``, and the marker occurs
  once, however it is written. Emphasis around both is allowed. For `Json`, the text is one object, a code block around
  it allowed.
- The text before this line ends a sentence with ``.`` or ``!``, or is a list with an empty line below. So the line is
  not part of another sentence, such as ``A perfect answer gets``, not an example below a colon, and not the answer to a
  question.
- After ``</verdict>``, text is allowed. After all other verdicts, nothing is.

`Judge` asks once more for the verdict alone if a reply does not keep the contract. Then the text after the reasoning
must be the line or the bare value, and nothing else. No text is evaluated as code, and the time is linear in the length
of the reply.
"""

from __future__ import annotations

import html
import json
import math
import re
import sys
import unicodedata
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, Protocol

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # before Python 3.12, pydantic does not accept the one of `typing`

from reward_loop._util.reasoning import reasoning_of
from reward_loop._util.text import listing, shorten
from reward_loop.errors import ConfigError


class NoVerdictError(ValueError):
    """The reply contains no valid verdict."""


class Verdict(Protocol):
    """A verdict format."""

    request: Mapping[str, Any]
    """Fields to add to the request, for example to make the server write this format."""
    again: str
    """What the judge is asked to reply with if it gave no verdict; empty if it is not asked again."""

    def read(self, reply: str, again: bool = False) -> tuple[Any, float | None]:
        """Return the verdict and its score; ``None`` if such a verdict has no score.

        Args:
            reply: the text of the reply.
            again: whether the judge was asked for the verdict alone.

        Raises:
            NoVerdictError: the reply contains no valid verdict.
        """


# --- The text that counts ---------------------------------------------------------------------------------------------


def final_text(reply: str) -> str:
    """Return the text after the last end of reasoning, without spaces around it.

    Raises:
        NoVerdictError: the reply ends within its reasoning.
    """
    if (parts := reasoning_of(reply)) is None:
        raise NoVerdictError(f"the reply ends in reasoning, which begins with {shorten(reply, 80)}")
    return reply[parts[-1].after if parts else 0 :].strip()


def plain(text: str) -> str:
    """Return the text as it looks: without invisible characters and HTML's entities, and in plain letters."""
    try:
        shown = html.unescape(text) if "&" in text else text
    except ValueError as error:  # Python reads no integers of more than 4,300 digits
        raise NoVerdictError(f"an HTML entity in it has too many digits ({error})") from None
    if shown.isascii():
        return shown
    # One by one: Python sorts a row of combining marks in quadratic time.
    return "".join(unicodedata.normalize("NFKC", char) for char in shown if unicodedata.category(char) != "Cf")


# --- A line with the value --------------------------------------------------------------------------------------------

_MARKUP = r"[ \t*_`$]{0,8}"
_AFTER_SENTENCE = r"[\s*_`~\"')\]}$\u2019\u201d\u300d-]*\Z"
_SENTENCE_END = re.compile(rf"[.!\u3002\uff01]{_AFTER_SENTENCE}")  # the line may be the answer to a question
# Dots after which a sentence goes on: "gets ...", "e.g.", and the number of a list's item.
_NO_SENTENCE_END = re.compile(rf"(?:\.\s?\.|\b\w\.\s?\w\.|(?:\A|\n)\W{{0,9}}\d{{1,2}}\.){_AFTER_SENTENCE}")
_LIST_END = re.compile(r"(?:\A|\n)[^\S\n]*(?:[-*+\u2022]|\d{1,2}[.)])\s[^\n]*[^\n:\s*_][*_ ]*\n\s*\n\s*\Z")
_CLOSING = str.maketrans("[({", "])}")


def check_before(text: str, may_be_in_block: bool = False) -> None:
    """Check that the text before the line of the verdict is complete.

    Args:
        text: the text before the line.
        may_be_in_block: whether the line may be in a code block, whose end follows.

    Raises:
        NoVerdictError: the line may belong to a sentence, or be an example.
    """
    if not may_be_in_block and text.count("```") % 2:
        raise NoVerdictError("the line of the verdict is in a code block without an end")
    end = text[-500:]
    has_sentence = _SENTENCE_END.search(end) and not _NO_SENTENCE_END.search(end)
    if end.strip() and not has_sentence and not _LIST_END.search(end):
        raise NoVerdictError(f"no sentence ends before the line of the verdict: {shorten(text[-80:], 80)}")


def _of_parts(parts: list[str], between: str = _MARKUP) -> str:
    return between.join(map(re.escape, parts))


# --- Formats ----------------------------------------------------------------------------------------------------------


def _response_format(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}}


def _object_format(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for an object with all these fields, in this order."""
    form = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return _response_format("verdict", form)


class _OfLine:
    """A format whose value is in a line, or with `enforce` in a field of an object."""

    request: Mapping[str, Any]
    again: str

    def _define(self, after: str | None, value: str, forms: list[str], field: Mapping[str, Any], enforce: bool) -> None:
        """Define the line and the request.

        Args:
            after: the marker, such as ``Score:``, ``[[`` or ``<verdict>``; ``None`` if the line is the value alone.
            value: a regular expression for the value.
            forms: the values, as the judge is asked for them.
            field: the JSON schema of the value.
            enforce: see `Number`.
        """
        self._after = after or ""
        tag = re.search(r"<(\w+)>\Z", self._after)
        brackets = re.search(r"[\[({]*\Z", self._after)
        opening = brackets[0] if brackets else ""
        closing = f"</{tag[1]}>" if tag else opening[::-1].translate(_CLOSING)
        marker, end = (_of_parts(re.findall(r"<\w+>|</\w+>|\w+|[^\w\s]", text)) for text in (self._after, closing))
        self._line = re.compile(
            rf"(?:\#{{1,6}} )?{_MARKUP}{marker}{_MARKUP}(?P<value>{value}){_MARKUP}{end}{_MARKUP}"
            + ("" if tag else rf"\.?{_MARKUP}"),
            re.IGNORECASE,
        )
        self._alone = re.compile(rf"{_MARKUP}(?P<value>{value}){_MARKUP}\.?{_MARKUP}", re.IGNORECASE)
        self._tag = tag[1].lower() if tag else ""
        words = re.findall(r"\w+", self._after)
        named = r"(?<![^\W_])" + _of_parts(words, r"[\W_]{0,4}")
        if tag:  # in any brackets; the end of the tag is the second one
            self._marker = re.compile(rf"[<\[({{\u2039\u3008]\W{{0,3}}{re.escape(tag[1])}", re.IGNORECASE)
        elif opening or not words:
            self._marker = re.compile(marker, re.IGNORECASE)
        else:  # also "Score = 7", and "a score of 7"
            self._marker = re.compile(
                rf"{named}[\W_]{{0,8}}?(?:[:=>\u2192\u2236-]|(?:(?:is|of)\W{{1,4}})?{value}(?!\w))", re.IGNORECASE
            )
        space = "" if closing or not after else " "
        written = [f"`{self._after}{space}{form}{closing}`" for form in forms]
        self._enforce = enforce
        field_end = r'"?\s{0,9}\}[\s`]{0,9}\Z'
        self._last_field = re.compile(rf'"verdict"\s{{0,9}}:\s{{0,9}}"?(?P<value>{value}){field_end}', re.IGNORECASE)
        self.request = _object_format({"reason": {"type": "string"}, "verdict": field}) if enforce else {}
        self.again = '{"reason": "...", "verdict": ...} in JSON' if enforce else " or ".join(written)

    def find(self, reply: str, again: bool) -> tuple[str, str | None]:
        """Return the value as the judge wrote it, and the text of the reply from it on; ``None`` if that is not known.

        A server may ignore `enforce`: then the line counts.

        Raises:
            NoVerdictError: the reply does not keep the contract.
        """
        text = final_text(reply)
        if self._enforce and (found := _object(reply)) is not None:
            given = found.get("verdict")
            if isinstance(given, bool) or not isinstance(given, str | int | float):
                raise NoVerdictError(f"'verdict' in the JSON object is {shorten(given)}")
            last = self._last_field.search(text)
            return str(given), last and text[last.start("value") :]
        if again:
            whole = self._line.fullmatch(text) or self._alone.fullmatch(text)
            if whole is None:
                raise NoVerdictError(f"asked again, the judge replied with more than the verdict: {shorten(text, 80)}")
            return whole["value"], text[whole.start("value") :]
        before, line, rest = self._split(text)
        last_line = self._line.fullmatch(line)
        if last_line is None:
            raise NoVerdictError(
                f"no {self._after!r} was found in the reply: {shorten(text, 80)}"
                if self._after and not self._marker.search(plain(text))
                else f"the last line is not {self._after!r} and a value alone: {shorten(line, 80)}"
            )
        shown = plain(text)
        if not self._after and any(self._alone.fullmatch(one) for one in plain(before).splitlines()):
            raise NoVerdictError("several lines of the reply are a value alone")
        count = sum(1 for _ in islice(self._marker.finditer(shown), 3)) if self._after else 1
        if count != 1 + bool(self._tag) or (self._tag and self._tag in plain(rest).lower()):
            raise NoVerdictError(f"the reply has {self._after!r} more than once")
        check_before(before, may_be_in_block=bool(self._tag))
        return last_line["value"], line[last_line.start("value") :] + rest

    def _split(self, text: str) -> tuple[str, str, str]:
        """Return the text before the line of the verdict, this line, and the text after it."""
        end = len(text)
        if self._tag:
            for closing in re.finditer(f"</{self._tag}>", text, re.IGNORECASE):
                end = closing.end()
        line_end = text.find("\n", end)
        line_end = len(text) if line_end < 0 else line_end
        start = text.rfind("\n", 0, end) + 1
        return text[:start], text[start:line_end].strip(), text[line_end:]


class Number(_OfLine):
    """A number in a range, such as ``Score: 7`` or ``Score: 7/10``; the number is the score, or scaled to 0..1."""

    def __init__(
        self,
        low: float,
        high: float,
        *,
        after: str | None = "Score:",
        scaled: bool = False,
        enforce: bool = False,
    ) -> None:
        """Define the format.

        Args:
            low: the smallest valid number.
            high: the largest valid number; also the only valid denominator in ``7/10``.
            after: the marker before the number; case and emphasis are ignored. A tag such as ``<verdict>`` is closed by
                ``</verdict>``, and ``[[`` by ``]]``. ``None`` if the last line must be the number alone.
            scaled: whether the score is the number scaled linearly: `low` becomes 0, and `high` becomes 1. The verdict
                is the number as the judge wrote it.
            enforce: make the server write a JSON object with a reason and, after it, the verdict: see `Json`.

        Raises:
            ConfigError: `low` is not less than `high`.
        """
        if not low < high:
            raise ConfigError(f"Number({low}, {high}): the first bound must be below the second")
        self.low, self.high, self.after, self.scaled = low, high, after, scaled
        value = r"[-+]?[0-9]{1,17}(?:\.[0-9]{1,17})?(?:\s?/\s?[0-9]{1,17}(?:\.[0-9]{1,17})?)?"
        self._define(after, value, ["N"], {"type": "number", "minimum": low, "maximum": high}, enforce)

    def read(self, reply: str, again: bool = False) -> tuple[float, float]:
        """Return the number, and its score."""
        written, _, scale = self.find(reply, again)[0].partition("/")
        number = _number(written)
        if scale and _number(scale) != self.high:
            raise NoVerdictError(f"the number is out of {scale.strip()}, not out of {self.high:g}")
        if number is None or not self.low <= number <= self.high:
            raise NoVerdictError(f"{shorten(written)} is not between {self.low:g} and {self.high:g}")
        return number, self._score(number)

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


class Choice(_OfLine):
    """One of a set of words, such as ``Verdict: correct``, or ``[[A]]`` with ``after="[["``."""

    def __init__(self, scores: Mapping[str, float], *, after: str | None = "Verdict:", enforce: bool = False) -> None:
        """Define the format.

        Args:
            scores: the score of each word. Case is ignored.
            after: the marker before the word: see `Number`.
            enforce: see `Number`.

        Raises:
            ConfigError: there are no words, a word is empty, or two words differ only in case or spaces.
        """
        self._known = {squeezed(word): (word, float(score)) for word, score in scores.items()}
        if not scores or len(self._known) < len(scores) or "" in self._known:
            raise ConfigError(f"Choice({dict(scores)}): name the words, each once")
        self.after = after
        # The longest word first, because one word may be the beginning of another.
        longest_first = sorted(self._known, key=len, reverse=True)
        value = "|".join(r"\s{1,9}".join(map(re.escape, word.split())) for word in longest_first)
        self._define(after, value, [*scores], {"enum": [*scores]}, enforce)

    def read(self, reply: str, again: bool = False) -> tuple[str, float]:
        """Return the word, as written in `scores`, and its score."""
        written, _ = self.find(reply, again)
        if (found := self._known.get(squeezed(written))) is None:
            raise NoVerdictError(f"{shorten(written)} is not one of {listing(self.words)}")
        return found

    @property
    def words(self) -> dict[str, float]:
        """The words, with their scores."""
        return dict(self._known.values())


class Pattern(_OfLine):
    """What a regular expression finds, such as ``Pattern(r"Grade (\\w+)", {"good": 1, "bad": 0})``."""

    def __init__(self, pattern: str, scores: Mapping[str, float] | None = None, *, enforce: bool = False) -> None:
        """Define the format.

        Args:
            pattern: the regular expression. Its first group is the verdict; without a group, the whole match. It must
                match once, and the match must be the last line. It runs on the event loop: avoid nested repetitions
                such as ``(a+)+``.
            scores: the score of each verdict; spaces around it and case are ignored. By default the verdict is a
                number, which is the score.
            enforce: see `Number`. It needs `scores`: the server does not know the numbers that the expression matches.

        Raises:
            ConfigError: the expression is invalid, two verdicts differ only in case or spaces, or there are no `scores`
                for `enforce`.
        """
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"Pattern({pattern!r}) is not a valid regular expression: {error}") from None
        self._scores = None if scores is None else {squeezed(word): float(score) for word, score in scores.items()}
        if enforce and scores is None:
            raise ConfigError(
                "Pattern(enforce=True): the JSON object might have a number that the expression excludes. Give the "
                "scores of the verdicts, or use Number(low, high, enforce=True)"
            )
        if scores is not None and len(self._scores or ()) < len(scores):
            raise ConfigError(f"Pattern: two of the verdicts {listing(scores)} differ only in case or spaces")
        self._define(None, r"[^\n]{1,200}?", [], {"enum": list(scores or ())}, enforce)
        self.again = self.again or "the verdict, in the form that was asked for"

    def read(self, reply: str, again: bool = False) -> tuple[str, float]:
        """Return the text that was found, and its score."""
        verdict, _ = self.find(reply, again)
        score = _number(verdict) if self._scores is None else self._scores.get(squeezed(verdict))
        if score is None:
            known = "a number" if self._scores is None else f"one of {listing(self._scores)}"
            raise NoVerdictError(f"{shorten(verdict)} is not {known}")
        return verdict, score

    def find(self, reply: str, again: bool) -> tuple[str, str | None]:
        text = final_text(reply)
        if self._enforce and text.startswith(("{", "`")):
            return super().find(reply, again)
        # A bare number might be one that the expression excludes, such as 10 with `[1-5]`.
        if again and self._scores is not None and self._pattern.fullmatch(text) is None:
            return text.strip(" *_`$."), None
        counts = [sum(1 for _ in islice(self._pattern.finditer(one), 2)) for one in (text, plain(text))]
        found = self._pattern.search(text)
        if found is None:
            raise NoVerdictError(f"nothing in the reply matches {self._pattern.pattern!r}: {shorten(text, 80)}")
        start = text.rfind("\n", 0, found.start()) + 1
        around = text[start : found.start()] + text[found.end() :].removesuffix(".")
        if max(counts) > 1 or around.strip(" \t*_`$"):
            raise NoVerdictError(f"the last line is not the only match of {self._pattern.pattern!r}, and nothing else")
        check_before(text[:start])
        return found[1 if self._pattern.groups else 0] or "", None


class Json:
    """A JSON object, such as ``{"reason": "...", "score": 7}``, validated with pydantic.

    The reply is this object, valid and without a key twice; a code block around it is allowed. A number must not be a
    text.
    """

    again = "the JSON object"

    def __init__(self, schema: Any, *, score: str = "score", enforce: bool = False) -> None:
        """Define the format.

        Args:
            schema: a pydantic model, a dataclass, or another type that pydantic's ``TypeAdapter`` supports. Models
                write fields in this order: name the reason before the score.
            score: the name of the field with the score.
            enforce: restrict the output of the server to the schema, with ``response_format``. vLLM, SGLang and OpenAI
                support it. A server that refuses it is an error; with one that ignores it, the reply is read as without
                it.
        """
        self._adapter: TypeAdapter[Any] = TypeAdapter(schema)
        self._field = score
        self.request: Mapping[str, Any] = {}
        if enforce:
            self.request = _response_format(getattr(schema, "__name__", "verdict"), self._adapter.json_schema())

    def read(self, reply: str, again: bool = False) -> tuple[Any, float]:
        """Return the validated object, as dicts, lists and scalars, and its score."""
        found, checked = self._validated(reply)
        score = checked.get(self._field) if isinstance(checked, Mapping) else None
        return checked, _checked_number(found, self._field, score)

    def _validated(self, reply: str) -> tuple[dict[str, Any], Any]:
        """Return the object as it was written, and as it was validated."""
        if (found := _object(reply)) is None:
            raise NoVerdictError(f"the reply is not a JSON object alone: {shorten(reply, 80)}")
        try:
            return found, self._adapter.dump_python(self._adapter.validate_python(found), mode="json")
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
            enforce: see `Json`; the server writes a reason before the ratings.

        Raises:
            ConfigError: no weight is positive, `low` is not less than `high`, or two names differ only in case, spaces
                or invisible characters.
        """
        if not low < high:
            raise ConfigError(f"Ratings: the lowest rating {low:g} must be below the highest, {high:g}")
        self._positive = sum(weight for weight in weights.values() if weight > 0)
        if not self._positive or not all(map(math.isfinite, weights.values())):
            raise ConfigError(f"Ratings({dict(weights)}): the weights must be finite, and at least one positive")
        # Each reply would have a key twice, and no verdict.
        if len({squeezed(plain(name)) for name in weights}) < len(weights):
            raise ConfigError(f"Ratings: two of {listing(weights)} differ only in case or spaces: rename one")
        rating = Annotated[float, Field(ge=low, le=high)]
        schema = TypedDict("Ratings", dict.fromkeys(weights, rating))  # type: ignore[misc]
        super().__init__(schema)
        if enforce:
            form = {"type": "number", "minimum": low, "maximum": high}
            self.request = _object_format({"reason": {"type": "string"}, **dict.fromkeys(weights, form)})
        self.weights, self.low, self.high = dict(weights), low, high

    def read(self, reply: str, again: bool = False) -> tuple[dict[str, float], float]:
        """Return the ratings, scaled to 0..1, and their weighted sum."""
        found, checked = self._validated(reply)
        ratings = {
            name: (_checked_number(found, name, given) - self.low) / (self.high - self.low)
            for name, given in checked.items()
        }
        return ratings, self.weigh(ratings)

    def weigh(self, ratings: Mapping[str, float]) -> float:
        """Return the weighted sum of ratings from 0 to 1, divided by the sum of the positive weights."""
        return sum(self.weights[name] * rating for name, rating in ratings.items()) / self._positive


def _number(text: str) -> float | None:
    try:
        number = None if "_" in text else float(text)  # Python reads 1_0 as 10
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) else None


def squeezed(text: str) -> str:
    return " ".join(text.split()).lower()


def _checked_number(found: Mapping[str, Any], name: str, score: Any) -> float:
    """Return a number of the validated object that is one in the reply, too: pydantic converts texts and booleans."""
    given = found.get(name, score)  # a field may have another name in the reply, or be computed
    is_number = not isinstance(given, str) and isinstance(given, bool) == isinstance(score, bool)
    if not is_number or not isinstance(score, int | float) or not abs(score) <= sys.float_info.max:
        raise NoVerdictError(f"{name!r} in the JSON object is {shorten(given)}, which is not a number")
    return float(score)


def _object(reply: str) -> dict[str, Any] | None:
    """Return the JSON object that the reply is; ``None`` if the reply is something else.

    Raises:
        NoVerdictError: the object is not valid.
    """
    text = final_text(reply)
    if (opening := re.match(r"```\w{0,9}\n", text)) and text.endswith("```"):
        text = text[opening.end() : -3].strip()
    if not text.startswith("{"):
        return None
    try:
        found: dict[str, Any] = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise NoVerdictError(f"the reply is not one valid JSON object ({error}): {shorten(text, 80)}") from None
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Compared as they look: `score` beside `Score` leaves open which of them is meant.
    found = dict(pairs)
    if len({squeezed(plain(name)) for name in found}) < len(pairs):
        raise ValueError("a key is repeated")
    return found
