"""Verdict formats: what a judge's verdict looks like, and its score. How it is found: `client/verdict_grammar.py`.

No text is evaluated as code.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Protocol

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # before Python 3.12, pydantic does not accept the one of `typing`

from reward_loop._util.text import listing, shorten
from reward_loop.client import wording
from reward_loop.client.verdict_grammar import (
    MOST_DRAFTS,
    Candidate,
    Grammar,
    NoVerdictError,
    check_last,
    check_restated,
    final_text,
    folded,
    is_quoted,
    number_of,
)
from reward_loop.errors import ConfigError

# Longer numbers end in the middle, which is then not a single number.
_NUMBER = r"\d{1,17}(?:\.\d{1,17})?"
_WORDS = rf"(?:{'|'.join(wording.NUMBER_WORDS)})\b"
_OUT_OF = (
    r"(?:(?:points?\s{1,3})?out\s{1,3}of\b(?:\s{1,3}a\s{1,3}possible\b)?|(?:von|sur|su|sobre|de|em|\u0438\u0437)\b"
    r"|\u6ee1\u5206(?:\u4e3a|\u662f)?)"
)
_SCALE = rf"[*_\"'`)\]}}$]{{0,6}}\s{{0,3}}\(?(?:/|{_OUT_OF})\s{{0,3}}[*_\"'`(\[{{$]{{0,6}}(?P<scale>{_NUMBER}|ten\b)"
_SUBJECT = (
    r"(?:(?:it|(?:the|this) (?:(?:final|given|student's|model's) )?(?:answer|response|solution|submission)) is\s{1,3}"
    r"[*_`]{0,3})?"
)
"""What may stand between a marker and a word."""
_LABEL = r"(?:(?:response|answer|assistant|model|option|candidate)\s(?!i\b))?"
"""What may stand before a letter: ``Winner: Response A``."""
_DENIED = re.compile(r"\W*(?:does|do|did)(?:\snot|n['\u2019]t)\b", re.IGNORECASE)
_NEGATION = frozenset(("no", "not", "nothing", "never", "nor", "none"))
_ITEM = r"[*_`\[(#]{0,6}(?:[a-z]{1,12}\s{1,3})?[*_`\[(#]{0,6}\d{1,4}[*_`\])]{0,6}"
_MOST_BRACES = 20_000


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
        value = rf"(?P<number>[-+]?{_NUMBER}(?:e[-+]?\d{{1,3}})?|{_WORDS})(?:{_SCALE})?"
        lowest, highest = self._score(low), self._score(high)
        self._grammar = Grammar(after, value, self._convert, _has_number, "number", lowest=lowest, highest=highest)

    def read(self, reply: str) -> tuple[float, float]:
        """Return the number, and its score."""
        found = self.locate(reply)
        return found.verdict, self._score(found.verdict)

    def locate(self, reply: str) -> Candidate:
        """Return the number, with its position in the reply; invisible characters do not count for it."""
        return self._grammar.read(reply)

    def _convert(self, match: re.Match[str]) -> tuple[float, float]:
        written, scale = match["number"], match["scale"]
        if scale is not None and number_of(scale) != self.high:
            raise NoVerdictError(f"the number is out of {scale}, not out of {self.high:g}: {shorten(match['value'])}")
        if (number := number_of(written)) is None or not self.low <= number <= self.high:
            raise NoVerdictError(f"{written} is not between {self.low:g} and {self.high:g}")
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
        known = {_squeezed(folded(choice)): (choice, float(score)) for choice, score in scores.items()}
        if not scores or len(known) < len(scores) or "" in known:
            raise ConfigError(f"Choice({dict(scores)}): name the words, each once")
        self.after = after
        # The longest word first, because one word may be the beginning of another.
        words = sorted(known, key=len, reverse=True)
        self._choices = [known[word] for word in words]
        # One group for each word: the text found may not be the word in lower case, since re ignores more differences.
        patterns = [r"\s{1,9}".join(map(re.escape, word.split())) for word in words]
        self._rivals = [
            # A word of one letter may also be the article "a" or the pronoun "I".
            re.compile(rf"(?<!\w){choice}(?!\w| [a-z])")
            if len(choice) == 1
            else re.compile(
                rf"(?<!\w){word}" + (r"(?:t|ne|thing)?(?!\w)" if word == "no" else ""), re.I
            )  # not "notation"
            for (choice, _), word in zip(self._choices, patterns, strict=True)
        ]
        value = "|".join(f"({word})" for word in patterns)
        self._polarity = {choice: self._judges(choice, score, scores.values()) for choice, score in self._choices}
        has_letters = any(len(word) == 1 for word in known)
        # "incorrect (the correct answer is 7)", "A is better than B"
        ignored = re.compile(
            rf"(?:\A\W*|\bthe )(?:{value}|right|true|actual) (?:answer|value|result|option)(?: (?:is|was|should"
            rf"|would)\b|\s?[:=])"
            rf"|\bnot (?:an? |the )?(?:{value})" + (wording.PREFERRED % value if has_letters else ""),
            re.IGNORECASE,
        )
        what, bounds = f"verdict of {listing(scores)}", (min(self.words.values()), max(self.words.values()))
        subject = _SUBJECT + (_LABEL if has_letters else "")
        self._grammar = Grammar(
            *(after, f"{subject}(?:{value})" if after else value, self._convert, self._has_rival, what),
            lowest=bounds[0],
            highest=bounds[1],
            ignored=ignored,
            is_word=True,
        )

    def read(self, reply: str) -> tuple[str, float]:
        """Return the word, as written in `scores`, and its score."""
        found = self.locate(reply)
        return found.verdict, self.words[found.verdict]

    def locate(self, reply: str) -> Candidate:
        """Return the word, with its position in the reply; invisible characters do not count for it."""
        return self._grammar.read(reply)

    @property
    def words(self) -> dict[str, float]:
        """The words, with their scores."""
        return dict(self._choices)

    def _convert(self, match: re.Match[str]) -> tuple[str, float]:
        _, *words = match.groups()  # the first is the whole value
        return next(choice for choice, word in zip(self._choices, words, strict=True) if word is not None)

    @staticmethod
    def _judges(choice: str, score: float, scores: Collection[float]) -> tuple[int, bool]:
        """Return 1 for a word that means a right answer, -1 for a wrong one, else 0; and whether by itself."""
        words = re.findall(r"\w+", choice.lower())
        if words and words[-1] in wording.AGAINST:
            return -1, True
        if len(words) == 1 and words[0] in wording.FOR:
            return 1, True
        return (score == max(scores)) - (score == min(scores)), False

    def _has_rival(self, clause: str, verdict: str) -> bool:
        polarity, says_so = self._polarity[verdict]
        if polarity == 1 and _DENIED.match(clause):
            return True
        against = wording.AGAINST if polarity == 1 else wording.FOR if polarity == -1 else ()
        words = re.findall(r"[^\W\d_]+", clause[:60].lower())[: 2 if says_so else 1]
        is_alone = says_so or not words or re.match(rf"\W*{words[0]}\s?(?:[.,;:)\]]|\Z)", clause, re.IGNORECASE)
        if is_alone and not _NEGATION & {*words} and any(word in against for word in words):
            return True
        return any(
            choice != verdict and rival.search(clause)
            for (choice, _), rival in zip(self._choices, self._rivals, strict=True)
        )


class Pattern:
    """What a regular expression finds, such as ``Pattern(r"<grade>(\\w+)</grade>", {"good": 1, "bad": 0})``."""

    request: Mapping[str, Any] = {}

    def __init__(self, pattern: str, scores: Mapping[str, float] | None = None) -> None:
        """Define the format.

        Args:
            pattern: the regular expression. Its first group is the verdict; without a group, the whole match. The last
                match in the reply counts, and reasoning is not searched. It runs on the event loop: avoid nested
                repetitions such as ``(a+)+``.
            scores: the score of each verdict; spaces around it and case are ignored. By default the verdict is a
                number, which is the score.

        Raises:
            ConfigError: the expression is invalid, or two verdicts differ only in case or spaces.
        """
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"Pattern({pattern!r}) is not a valid regular expression: {error}") from None
        self._scores = None if scores is None else {_squeezed(word): float(score) for word, score in scores.items()}
        if scores is not None and len(self._scores or ()) < len(scores):
            raise ConfigError(f"Pattern: two of the verdicts {listing(scores)} differ only in case or spaces")

    def read(self, reply: str) -> tuple[str, float]:
        """Return the text that was found, and its score."""
        text = final_text(reply)
        # Only the last ones are kept: a pattern may match at each character of a long reply.
        matches = deque(self._pattern.finditer(text), maxlen=MOST_DRAFTS + 1)
        if not matches:
            raise NoVerdictError(f"nothing in it matches {self._pattern.pattern!r}")
        *drafts, found = [self._candidate(match) for match in matches]
        quoted = is_quoted(text, found.begin, text[found.begin : found.end])
        check_last(found, drafts[::-1] if quoted else drafts[-1:], quoted)
        if text != reply and self._pattern.search(reply, found.end):
            raise NoVerdictError(f"reasoning with another verdict follows the last one: {found.shown}")
        verdict, score = found.verdict, found.score
        check_restated(found, wording.RATING_NAMES, score, self._score_of)
        if score is None:
            known = "a number" if self._scores is None else f"one of {listing(self._scores)}"
            raise NoVerdictError(f"{shorten(verdict)} is not {known}")
        if not abs(score) <= sys.float_info.max:
            raise NoVerdictError(f"{shorten(verdict)} is not a finite number")
        return verdict, score

    def _candidate(self, match: re.Match[str]) -> Candidate:
        group = 1 if self._pattern.groups else 0
        verdict = match[group] or ""
        score = self._score_of(verdict)
        return Candidate(match.string, match.start(), match.start(group), match.end(), verdict, score)

    def _score_of(self, verdict: str) -> float | None:
        return number_of(verdict) if self._scores is None else self._scores.get(_squeezed(verdict))


class Json:
    """A JSON object, such as ``{"reason": "...", "score": 7}``, validated with pydantic.

    The last object in the reply counts, if it is valid JSON without a key twice. A number must not be a text.
    """

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
        candidate, checked = self._object(reply)
        score = checked.get(self._field) if isinstance(checked, Mapping) else None
        if not isinstance(score, int | float) or not abs(score) <= sys.float_info.max:
            raise NoVerdictError(f"{self._field!r} in the JSON object is {shorten(score)}, which is not a number")
        _check_number(candidate.verdict, self._field, score)
        check_restated(candidate, (self._field, *wording.RATING_NAMES), score, number_of)
        return checked, float(score)

    def _object(self, reply: str) -> tuple[Candidate, Any]:
        """Return the last object as it was written, and as it was validated."""
        found = _last_object(reply)
        try:
            return found, self._adapter.dump_python(self._adapter.validate_python(found.verdict), mode="json")
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
            ConfigError: no weight is positive, `low` is not less than `high`, or two names differ only in case, spaces
                or letters that look alike.
        """
        if not low < high:
            raise ConfigError(f"Ratings: the lowest rating {low:g} must be below the highest, {high:g}")
        self._positive = sum(weight for weight in weights.values() if weight > 0)
        if not self._positive or not all(map(math.isfinite, weights.values())):
            raise ConfigError(f"Ratings({dict(weights)}): the weights must be finite, and at least one positive")
        # Each reply would have a key twice, and no verdict.
        if len({_squeezed(folded(name)) for name in weights}) < len(weights):
            raise ConfigError(
                f"Ratings: two of {listing(weights)} differ only in case, spaces or look-alikes: rename one"
            )
        rating = Annotated[float, Field(ge=low, le=high)]
        schema = TypedDict("Ratings", dict.fromkeys(weights, rating))  # type: ignore[misc]
        super().__init__(schema, enforce=enforce)
        self.weights, self.low, self.high = dict(weights), low, high

    def read(self, reply: str) -> tuple[dict[str, float], float]:
        """Return the ratings, scaled to 0..1, and their weighted sum."""
        found, checked = self._object(reply)
        for name, given in checked.items():
            _check_number(found.verdict, name, given)
            check_restated(found, (name,), given, number_of)
        ratings = {name: (given - self.low) / (self.high - self.low) for name, given in checked.items()}
        return ratings, self.weigh(ratings)

    def weigh(self, ratings: Mapping[str, float]) -> float:
        """Return the weighted sum of ratings from 0 to 1, divided by the sum of the positive weights."""
        return sum(self.weights[name] * rating for name, rating in ratings.items()) / self._positive


class Order:
    """An order of numbered responses, best first, such as ``Ranking: 3 > 1 > 2``. It has no score: see `ranking`.

    The numbers may also be separated by commas, semicolons, ``=``, ``->`` or ``then``, and have a word before them:
    ``Answer 3, Answer 1``.
    """

    request: Mapping[str, Any] = {}

    def __init__(self, count: int, *, after: str = "Ranking:") -> None:
        """Define the format.

        Args:
            count: the number of responses, which are numbered from 1.
            after: the text before the order; case, spaces and emphasis are ignored.
        """
        self._known = {str(index + 1): index for index in range(count)}
        value = rf"{_ITEM}(?:\s{{0,3}}(?:>=?|=|,|;|\u2265|\u2192|->|then)\s{{0,3}}{_ITEM}){{0,{count}}}"
        self._grammar = Grammar(after, value, self._convert, _has_another_order, "order")

    def read(self, reply: str) -> tuple[list[int], None]:
        """Return the indices of the responses, from 0, best first."""
        return self._grammar.read(reply).verdict, None

    def _convert(self, match: re.Match[str]) -> tuple[list[int], None]:
        found = re.findall(r"\d+", match["value"])
        if sorted(found) != sorted(self._known):
            count = len(self._known)
            raise NoVerdictError(f"{shorten(match['value'])} does not contain each number from 1 to {count} once")
        return [self._known[number] for number in found], None


_OTHER_NUMBER = re.compile(
    rf"[%\u2030]|\band a (?:half|quarter)\b|\A\s*(?:halves|thirds|quarters|fifths|tenths)\b|\bpoint\s(?:\d|{_WORDS})"
    r"|\A\s(?:errors?|mistakes?|issues?|steps?|examples?|cases?)\b"
    rf"|\A\W*{_WORDS}(?!\s(?!if\b|for\b|or\b|at\b|would\b|points?\b|out\b))",
    re.IGNORECASE,
)
"""Text after a number that makes it another number."""


def _has_number(clause: str, verdict: float) -> bool:
    """Return whether a clause has another number, in digits or as its first word."""
    if any(char.isdigit() for char in clause):
        digits = re.findall(r"\d+(?:\.\d+)?", clause)
        if not digits or any(float(number) != verdict for number in digits):
            return True
    other = _OTHER_NUMBER.search(clause)
    return other is not None and number_of(re.sub(r"\W", "", other[0])) != verdict


def _has_another_order(clause: str, _: Any) -> bool:
    return re.search(r"\d|worst|lowest|ascending|revers", clause, re.IGNORECASE) is not None


def _squeezed(text: str) -> str:
    return " ".join(text.split()).lower()


def _check_number(found: Mapping[str, Any], name: str, score: Any) -> None:
    """Check that a number of the validated object is one in the reply, too: pydantic converts texts and booleans."""
    given = found.get(name, score)  # a field may have another name in the reply, or be computed
    if isinstance(given, str) or isinstance(given, bool) != isinstance(score, bool):
        raise NoVerdictError(f"{name!r} in the JSON object is {shorten(given)}, which is not a number")


def _last_object(reply: str) -> Candidate:
    """Return the last JSON object that is not part of another value.

    Text in braces without a colon, such as TeX, is not an object. All else in braces must be one: an inner object never
    stands for a broken outer one, and an earlier object never for a later broken one.

    Raises:
        NoVerdictError: there is none, or it is not valid JSON.
    """
    text = final_text(reply)
    places = [place for place in _in_braces(text) if ":" in text[slice(*place)]]
    if not places:
        raise NoVerdictError("no JSON object was found in the reply")
    found = _decoded(text, *places[-1])
    if found.verdict is None:
        raise NoVerdictError(f"the last JSON object is broken: {found.shown}")
    before, after = text[: found.begin].rstrip()[-1:], text[found.end :].lstrip()[:1]
    if before in ("[", ",", ":") and after in ("]", ",", "}"):
        raise NoVerdictError(f"the last JSON object is part of a list: {found.shown}")
    if reply[found.end :] != text[found.end :] and "{" in reply[found.end :]:
        raise NoVerdictError(f"reasoning with another JSON object follows the last one: {found.shown}")
    quoted = is_quoted(text, found.begin)
    earlier = places[-2 : -2 - (MOST_DRAFTS if quoted else 1) : -1]
    check_last(found, [one for place in earlier if (one := _decoded(text, *place)).verdict is not None], quoted)
    return found


def _in_braces(text: str) -> Iterator[tuple[int, int]]:
    """Return where text in braces begins and ends, without what is nested in it.

    Raises:
        NoVerdictError: a brace has no counterpart.
    """
    depth = start = position = 0
    for _ in range(_MOST_BRACES):
        # Outside of braces, quotes are those of prose; inside, braces in strings do not count.
        found = (_STRING_OR_BRACE if depth else _BRACE).search(text, position)
        if found is None:
            break
        position = found.end()
        if text[found.start() - 1 : found.start()] == "\\" and found[0] in "{}":
            continue  # it is TeX
        if found[0] == "{":
            start = start if depth else found.start()
            depth += 1
        elif found[0] == "}":
            depth -= 1
            if depth < 0:
                raise NoVerdictError("a closing brace has no beginning, so a JSON object may be broken")
            if not depth:
                yield start, position
    else:
        raise NoVerdictError(f"the reply has more than {_MOST_BRACES} braces and strings")
    if depth:
        raise NoVerdictError(f"the last JSON object is broken: {shorten(text[start : start + 80])}")


# They begin with a set of characters, so that `re` searches fast.
_BRACE = re.compile(r"[{}]")
_STRING_OR_BRACE = re.compile(r"""[{}"](?:(?<=")(?:[^"\\]++|\\.)*+(?:"|\Z))?""", re.DOTALL)


def _decoded(text: str, begin: int, end: int) -> Candidate:
    """Return the object; its verdict is ``None`` if it is not valid JSON, or has a key twice."""
    try:
        found = json.loads(text[begin:end], parse_constant=_refuse, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        found = None
    return Candidate(text, begin, begin, end, found, None)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Compared without case and look-alikes: `score` beside `Score` leaves open which of them is meant.
    found = dict(pairs)
    if len({_squeezed(folded(name)) for name in found}) < len(pairs):
        raise ValueError("a key is repeated")
    return found
