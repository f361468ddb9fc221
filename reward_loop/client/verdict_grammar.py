"""The grammar by which verdicts are read from the reply of a judge.

What cannot be read without doubt is not a verdict: the sample is unscored, with the reason. All formats share these
rules; a format decides only what its value looks like, and which other texts may be the verdict. So a new kind of doubt
belongs here, to one of the rules: in a format, the other formats would still accept it.

1. *Text that counts.* Reasoning does not count: what stands between ``<think>`` and ``</think>``, ``[THINK]`` and
   ``[/THINK]``, in another channel of gpt-oss than ``final``, and similar; and all text before an end without its
   beginning. A reply that ends in reasoning has no text that counts, and one with a verdict in later reasoning is
   doubtful. `Judge` removes quotes of fenced responses before. Invisible characters are removed, and full-width forms
   become ASCII.
2. *Candidates.* A candidate is a marker, such as ``Score:``, at the beginning of a word, with its value directly after
   it, or alone on the next line. Markdown, quotes and brackets may surround both. Case is ignored. The candidates of
   `Json` are objects, and those of `Pattern` matches; rule 3 checks only the text directly before and after them.
3. *Only the last candidate can be the verdict.* It must be understood, and about this answer: the sentence that leads
   to it, also from the line before, may not make it an example (``e.g. Score: 8``), a condition, a quotation, what
   another one gives, says or asks for (``A perfect answer gets``; also ``Consider a perfect answer. It gets``), or what
   the judge does not give. Nothing may qualify
   its value: another number or word that may be the verdict in the same clause, a word that judges otherwise
   (``correct, wrong``), a range, a unit such as ``%``, a question mark, a cross beside another than the lowest score, a
   hedge such as ``or`` or ``maybe``, also before the marker. A word of `Choice` is qualified by each word directly
   after it that is not known to be harmless (``correct approach``, ``correct in part``). The rest of the line may be
   an explanation; after ``because`` it is not checked.
4. *An earlier candidate is a draft*, and never replaces a last one that is not understood. It makes the last one
   doubtful if the two differ, it is not quoted, and nothing but punctuation or ``or`` stands between them, or a turn
   of the user, which the model made up; or if both are items of a list, of criteria, answers or grades.
5. *A quoted candidate*, which stands in quotation marks, a block quote, a code block or after a word such as ``wrote``,
   or which has a name of its own, such as ``Style score:``, counts only as the end of the reply, and only if no draft
   differs. A code block that is the whole reply is not a quote.
6. *Nothing after the candidate may contradict it*: neither the marker's words with another value (``The score is 3``),
   nor another value alone in a line, also after a word such as ``Revised:``, nor a sentence that takes the verdict
   back (``Wait, ...``). Objects and matches have no marker: a word such as ``Score:`` with another value, in a line
   directly before or anywhere after, contradicts them.

Each rule takes linear time, because replies are read on the event loop: patterns cannot backtrack over more than a
bounded number of characters. Where a judge writes far less, numbers are limited: of tags, of drafts, of characters
after the verdict.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import dropwhile, groupby, takewhile
from typing import Any, NamedTuple

from reward_loop.client import wording


class NoVerdictError(ValueError):
    """The reply contains no valid verdict."""


class Candidate(NamedTuple):
    """A verdict that the reply may contain."""

    text: str
    """The text that counts."""
    begin: int
    """The position of the candidate in this text, with its marker."""
    start: int
    """The position of its value."""
    end: int
    """The position after the value."""
    verdict: Any
    """The value."""
    score: float | None
    """The score of the value."""

    @property
    def shown(self) -> str:
        """The beginning of the candidate, for error messages."""
        return _shown(self.text, self.begin)


# --- Text that counts -------------------------------------------------------------------------------------------------


def _ranges(codes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of consecutive numbers."""
    for _, run in groupby(enumerate(sorted(codes)), lambda place: place[1] - place[0]):
        numbers = [number for _, number in run]
        yield numbers[0], numbers[-1]


_INVISIBLE = (
    *range(0x09), *range(0x0E, 0x1C), *range(0x7F, 0x85), *range(0x86, 0xA0), 0xAD, 0x34F, 0x61C, 0x115F, 0x1160,
    0x17B4, 0x17B5, *range(0x180B, 0x1810), *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070),
    0x20E3, 0x3164, *range(0xFE00, 0xFE10), 0xFEFF, 0xFFA0, *range(0xFFF0, 0xFFFC), *range(0xE0000, 0xE1000),
)  # fmt: skip
_LOOK_ALIKES = (
    "\u0410\u0430\u0415\u0435\u041e\u043e\u0420\u0440\u0421\u0441\u0425\u0445\u0405\u0455\u0406\u0456\u0408\u0458"
)
_FOLDS: dict[int, str | None] = {
    # One character each, so that positions in the text of a token and of a reply agree. Digits above the line, such as
    # the exponent in 8², are not digits of the number, and stay.
    **{code: unicodedata.normalize("NFKC", chr(code)) for code in (*range(0xFF01, 0xFF5F), *range(0x1D400, 0x1D800))},
    **dict.fromkeys((0x0B, 0x0C, 0x0D, 0x85, 0x2028, 0x2029), "\n"),
    **dict.fromkeys((0x2010, 0x2011, 0x2212, 0xFE63), "-"),
    **dict.fromkeys((0x2013, 0x2014, 0x2015, 0xFE58), "\u2012"),
    **dict.fromkeys((0x02D0, 0x05C3, 0x2236, 0xA789, 0xFE55, 0xFE13), ":"),
    **dict.fromkeys((0x27E6, 0x301A, 0x3010), "["),
    **dict.fromkeys((0x27E7, 0x301B, 0x3011), "]"),
    # Cyrillic letters that look like Latin ones in both cases.
    **{ord(letter): latin for letter, latin in zip(_LOOK_ALIKES, "AaEeOoPpCcXxSsIiJj", strict=True)},
    **dict.fromkeys(_INVISIBLE, None),
}  # fmt: skip
_MOST_TAGS = 1000
_MOST_BRACKETS = 20_000
"""The largest number of brackets, at each of which a tag is tried: a bound on the time."""
_FOLDED = re.compile(f"[{''.join(f'{chr(first)}-{chr(last)}' for first, last in _ranges(_FOLDS))}]++")
_MOST_FOLDED = 1000

_REASONING = (
    r"(?:think(?:ing)?|thoughts?|reason(?:ing)?|reflection|analysis|scratch_?pad|monologue|cot|deliberation|rationale)"
)
# It begins with a set of characters, without the flag IGNORECASE, so that `re` searches fast for its beginning.
_TAG = re.compile(
    r"[<\u25c1&\[](?i:(?:(?<=[<\u25c1])|(?<=&)lt;)(?:"
    r"\|?(?P<close>/\s?|end_(?:of_)?)?(?:[a-z]{1,12}[:_]){0,3}" + _REASONING + r"(?:_[a-z]{1,20})?"
    r"(?:\s[^<>\u25b7\n]{0,80})?\s?\|?(?:[>\u25b7]|&gt;)"
    # The channels of gpt-oss and Gemma.
    r"|(?P<final>\|channel\|?>\s?final|channel\|>)|\|channel\|?>)"
    r"|(?<=\[)(?-i:(?P<mistral>/?)THINK(?:ING)?\]))"
)
# The channels of gpt-oss, if the server removes special tokens from its reply.
_BARE_CHANNEL = re.compile(r"\s{0,9}analysis(?=[A-Z])")
_BARE_FINAL = "assistantfinal"


def folded(text: str) -> str:
    """Return the text without invisible characters; full-width forms, dashes and look-alikes become ASCII."""
    if text.isascii():
        return text.translate(_FOLDS)
    # `translate` is slow for other texts: 50 ns for a character that it does not change.
    found, count = _FOLDED.subn(lambda run: run[0].translate(_FOLDS), text, count=_MOST_FOLDED)
    # With many runs of such characters, one pass over the whole text is faster than a call for each.
    return found if count < _MOST_FOLDED else text.translate(_FOLDS)


def final_text(reply: str) -> str:
    """Return the reply with all reasoning replaced by as many other characters.

    Raises:
        NoVerdictError: the reply ends within its reasoning.
    """
    brackets = sum(map(reply.count, "<\u25c1&["))
    if brackets > _MOST_BRACKETS:
        raise NoVerdictError(f"the reply has more than {_MOST_BRACKETS} brackets, each of which may begin reasoning")
    begins: list[int] = []
    blanks: list[tuple[int, int]] = []
    if _BARE_CHANNEL.match(reply):
        final = reply.rfind(_BARE_FINAL)
        if final < 0 or _BARE_CHANNEL.match(reply, final + len(_BARE_FINAL)):
            raise NoVerdictError(f"the reply ends in reasoning, which begins with {_shown(reply, 0)}")
        blanks.append((0, final + len(_BARE_FINAL)))
    for index, tag in enumerate(_TAG.finditer(reply) if brackets else ()):
        if index == _MOST_TAGS:
            raise NoVerdictError(f"the reply has more than {_MOST_TAGS} tags of reasoning")
        if not (tag["close"] or tag["mistral"] or tag["final"]):
            begins.append(tag.start())
        elif tag["final"] or len(begins) < 2:
            blanks.append((begins[0] if begins else 0, tag.end()))
            begins.clear()
        else:
            # Nested reasoning has ended; the reasoning around it has not.
            begins.pop()
    if begins:
        raise NoVerdictError(f"the reply ends in reasoning, which begins with {_shown(reply, begins[0])}")
    parts: list[str] = []
    end = 0
    for begin, next_end in blanks:
        if begin < end:  # an end without its beginning: all text before is reasoning
            parts, begin, end = [], 0, 0
        # As many characters, so that positions in both texts agree.
        parts += [reply[end:begin], "\ufffc" * (next_end - begin)]
        end = next_end
    return "".join([*parts, reply[end:]])


# --- Candidates -------------------------------------------------------------------------------------------------------

_HTML = r"<(?!(?:s|del|strike)>)/?[a-zA-Z][^<>\n]{0,60}>"
_TICKS = "\u2705\u2611\u2713\u2714\U0001f44d"
_CROSSED = "\u2612\u26d4\u2715\u2716\u2717\u2718\u274c\u274e\U0001f44e\U0001f5d9\U0001f6ab"
_SIGNS = _TICKS + _CROSSED
_INSIDE = rf"(?:\s++|[*_\"'`~\\)\]}}]|{_HTML}|&\#?\w{{1,8}};){{0,16}}"
"""What may stand between the parts of a marker."""
_AROUND = (
    r"(?:\s++|[*_\"'`(\[$|)\]}\u2018\u201c"
    + _SIGNS
    + r"]|\\boxed\{|\\text(?:bf)?\{|\\mathbf\{|\\\(|\\\[|"
    + _HTML
    + r"){0,24}"
)
"""What may stand between a marker and its value: spaces, emphasis, quotes, opening brackets, TeX's \\boxed{, signs."""
_CLOSED = re.compile(r"(?:[*_\"'`)\]}$|\u2019\u201d]++|\\[)\]]|" + _HTML + r"){0,12}+")
_JOINED = (
    r"(?:\s++|[*_\"'`~=>|:)\]}\u2012\\]|-(?=[\s>])|&\#?\w{1,8};|"
    + _HTML
    + r"|(?:is|was|of|to|be|now|should|would|must|could|becomes?|only|lowered|raised|reduced|changed|revised)\b){0,16}+"
)
"""What may stand between the words of a marker and a value, instead of the marker's last sign."""
_NAMED = r"[^\n.!?:=]{1,40}[:=]"
_LETTER = r"[^\W\d_\u2e80-\ua4cf\uac00-\ud7af\U00020000-\U0003ffff]"
"""A letter of a language that puts spaces between words."""
_BOUNDARY = rf"(?<!{_LETTER}.)(?<!{_LETTER}[-_].)(?<!{_LETTER}__.)"
"""Comes after the first letter of a word."""

_LONGEST_BEFORE = 160
_LONGEST_SAYING = 20
_LONGEST_REST = 20_000
_LONGEST_LAST = 500
"""The number of characters at the end of a text in which the last verdict is searched first."""
_LONGEST_DRAFT = 1000
"""The largest number of characters between the beginnings of a draft and of a verdict directly after it."""
MOST_DRAFTS = 100
"""The largest number of earlier candidates that are compared, which bounds the time."""
_WHOLE_BLOCK = re.compile(r"[\s\ufffc]*+```(?:[^`]++|`(?!``))*+```\s*+")
"""A reply that is one code block, which is then not a quote."""
_BLOCK_BEGIN = re.compile(r"```\w{0,9}\s*\Z")
_GAP = rf"(?:[\s\d*_\"'`.,;:/|&()\[\]{{}}<>$\\\u2012-]|(?<=```)\w{{1,9}}|{_HTML}){{0,40}}"
_BETWEEN = re.compile(rf"{_GAP}(?:(?:or|and|vs|versus)\b)?{_GAP}")


def check_last(found: Candidate, drafts: Sequence[Candidate | None], quoted: bool) -> None:
    """Check the last candidate: rules 4 and 5, and that the text after it does not take it back.

    Args:
        found: the candidate.
        drafts: the earlier candidates, the last one first; ``None`` for one that is not understood.
        quoted: whether the candidate is quoted, or has a name of its own.

    Raises:
        NoVerdictError: the candidate is doubtful.
    """
    _check_before(found)
    if wording.QUALIFIED.match(found.text, found.end):
        raise NoVerdictError(f"the text after it qualifies the last verdict: {found.shown}")
    for index, draft in enumerate(drafts):
        if draft is None or draft.verdict == found.verdict:
            continue
        if index == 0 and not is_quoted(found.text, draft.begin, found.text[draft.begin : draft.start]):
            _check_draft(found, draft)
        if quoted:
            raise NoVerdictError(f"the last verdict may be a quote, and an earlier one differs: {found.shown}")
        if index == 0 and wording.TURN.search(found.text, draft.end, found.begin):
            raise NoVerdictError(f"a turn of the user stands between two different verdicts: {found.shown}")
    if taken_back := wording.TAKEN_BACK.search(found.text, found.end, found.end + _LONGEST_REST):
        shown = _shown(found.text, taken_back.start())
        raise NoVerdictError(f"the text after {found.shown} takes it back: {shown}")
    if quoted and (len(drafts) == MOST_DRAFTS or not wording.ENDS.match(found.text, found.end)):
        raise NoVerdictError(f"the last verdict may be a quote: {found.shown}")


def _check_draft(found: Candidate, draft: Candidate) -> None:
    """Check that another verdict before the last one is not as good as it: rule 4."""
    name, draft_name = _item_name(found, draft.end), _item_name(draft, 0)
    is_named = name != "" and not wording.FINAL_NAME.search(name)
    is_draft_named = draft_name != "" and not wording.FINAL_NAME.search(draft_name)
    if not is_draft_named or is_named:
        if _BETWEEN.fullmatch(found.text, draft.end, found.begin):
            raise NoVerdictError(f"the reply has two different verdicts: {_shown(found.text, draft.begin)}")
        is_next = found.text.count("\n", draft.end, found.begin) == 1
        are_described = is_next and all(wording.DESCRIBED.match(found.text, one.end) for one in (draft, found))
        if (is_named and is_draft_named) or are_described:
            raise NoVerdictError(f"the last verdict is one of a list: {_shown(found.text, draft.begin)}")


def _item_name(candidate: Candidate, start: int) -> str:
    """Return the name that a candidate has in a list: before it in its line, or in a heading above it."""
    text = candidate.text[max(start, candidate.begin - _LONGEST_BEFORE) : candidate.begin]
    above, _, line = _BLOCK_BEGIN.sub("", text).rpartition("\n")
    if re.search(r"[^\W\d_]", line):
        is_named = re.search(r"[:|\u2012(>\u2192-][\s*_`(]*\Z", line) or re.match(r"\s*\d{1,2}[.)]\s", line)
        return line if is_named else ""
    above = above.rstrip().rpartition("\n")[2]
    mark = wording.ITEM_MARK.match(above)
    assert mark is not None
    is_numbered = re.match(r"\s*\d{1,2}[.)]\s", above) is not None
    is_heading = bool(mark[0].strip()) and not re.search(r"[.!?\u3002]\W*\Z", above)
    if len(above) < 80 and (is_numbered or is_heading or re.search(r":\W*\Z", above)):
        return above
    headings = wording.HEADING.findall(candidate.text, max(start, candidate.begin - _LONGEST_DRAFT), candidate.begin)
    return headings[-1] if headings else ""


def check_restated(found: Candidate, names: Sequence[str], value: Any, known: Callable[[str], Any]) -> None:
    """Check that no word such as ``Score:`` with another value contradicts an object or a match: rule 6.

    Args:
        found: the candidate.
        names: the names of the value, besides ``score`` and similar.
        value: the value.
        known: returns the value that a text stands for, or ``None``.

    Raises:
        NoVerdictError: there is another value.
    """
    start, end = max(0, found.begin - _LONGEST_BEFORE), found.end + _LONGEST_REST
    around = (found.text[start : found.begin] + found.text[found.end : end]).lower()
    # Most replies have none of the names, and this is much faster than the pattern.
    if not any(name.lower() in around for name in names):
        return
    pattern = re.compile(wording.RESTATED % "|".join(map(re.escape, names)), re.IGNORECASE)
    before = [*pattern.finditer(found.text, start, found.begin)][-1:]
    after = pattern.finditer(found.text, found.end, end)
    for other in (*(one for one in before if _BETWEEN.fullmatch(found.text, one.end(), found.begin)), *after):
        stated = known(other["value"])
        if stated is not None and stated != value:
            raise NoVerdictError(f"another value stands beside {found.shown}: {_shown(found.text, other.start())}")


def _check_before(found: Candidate) -> None:
    """Check that nothing before the candidate qualifies it: rule 3."""
    begin = max(0, found.begin - _LONGEST_BEFORE)
    before = found.text[begin : found.begin]
    line = before.rpartition("\n")[2]
    stripped = (_BLOCK_BEGIN.sub("", before) if "```" in before else before).rstrip(" \t\r\n*_\"'`(>#|[$\ufffc-")
    *earlier, lead = wording.LEAD_BREAK.split(stripped.rstrip(" \t\r\n*_\"'`(>#|[:$\ufffc-"))
    words = dropwhile(wording.GIVEN.__contains__, reversed(re.findall(r"\w+", lead[-40:].lower())))
    clause = lead.rpartition(", ")[2]
    clause = clause if " " in clause.strip() else lead
    gives = next(words, "") in wording.GIVES
    is_alien = gives and bool(wording.ALIEN.search(clause) or not wording.OWN.match(clause))
    if gives and earlier and wording.PRONOUN.match(lead):
        is_alien = is_alien or wording.IMAGINED.match(earlier[-1]) is not None
    if stripped.endswith(":") and len(name := re.findall(r"\w+", lead.lower())) < 6:
        is_alien = is_alien or not wording.NAMING.isdisjoint(name) or wording.POSSESSIVE.search(lead) is not None
    if is_alien or wording.CONDITION.match(lead) or (not lead.isascii() and wording.ALIEN_CJK.search(lead)):
        raise NoVerdictError(
            f"the last verdict is about something else, or under a condition: {_shown(lead.strip(), 0)}"
        )
    if wording.NOT_SAID.search(line[-60:]) or wording.OTHERS.search(before):
        raise NoVerdictError(f"the text before it qualifies the last verdict: {_shown(line[-60:], 0)}")
    if wording.INLINE_QUOTE.search(line) and '"' not in found.text[found.begin : found.start]:
        raise NoVerdictError(f"the last verdict is a quotation in a sentence: {_shown(line[-60:], 0)}")


def number_of(text: str) -> float | None:
    """Return the number in digits or as a word; ``None`` for another text."""
    if text.lower() in wording.NUMBER_WORDS:
        return float(wording.NUMBER_WORDS.index(text.lower()))
    try:
        return None if "_" in text else float(text)  # Python reads 1_0 as 10
    except ValueError:
        return None


def is_quoted(text: str, start: int, marker: str = "") -> bool:
    """Return whether a candidate is quoted: rule 5, without code blocks and names.

    Args:
        text: the text that counts.
        start: the position of the candidate's marker.
        marker: the text of the marker, which may contain the end of the quotation, as in ``"score":``.
    """
    line_start = text.rfind("\n", 0, start) + 1
    before = text[max(line_start, start - 20) : start].rstrip(" *_(")
    if not any(quote in marker for quote in wording.QUOTES):
        odd = text.count('"', 0, start) % 2 == 1
        if before[-1:] in (*wording.QUOTES,) or odd or text.rfind("\u201c", 0, start) > text.rfind("\u201d", 0, start):
            return True
    return text[line_start : min(line_start + 20, start)].lstrip().startswith(">") or bool(
        wording.SAYING.search(text, max(0, start - _LONGEST_SAYING), start)
    )


def _shown(text: str, start: int) -> str:
    return repr(text[start : start + 80])


class Grammar:
    """Finds the verdict of a format that is a value after a marker, or alone in the last line."""

    def __init__(
        self,
        after: str | None,
        value: str,
        convert: Callable[[re.Match[str]], tuple[Any, float | None]],
        rivals: Callable[[str, Any], bool],
        what: str,
        *,
        lowest: float = -math.inf,
        highest: float = math.inf,
        ignored: re.Pattern[str] | None = None,
        is_word: bool = False,
    ) -> None:
        """Define the format.

        Args:
            after: the marker; ``None`` if the last line must contain only the value.
            value: a regular expression for the value. What follows the value is checked separately.
            convert: returns the verdict and the score of a match.
            rivals: whether a clause after the given verdict contains another value.
            what: the name of a value in error messages.
            lowest: the lowest score, the only one that a cross may stand beside.
            highest: the highest score.
            ignored: what may follow a value and does not qualify it, although it contains a value.
            is_word: whether a sentence such as ``The answer is incorrect.`` may contain another verdict.
        """
        self._lowest, self._highest, self._ignored, self._is_choice = lowest, highest, ignored, is_word
        self._after, self._convert, self._rivals, self._what = after, convert, rivals, what
        parts = re.findall(r"\w+|[^\w\s]", folded(after or ""))
        self._closes = {"[": "]", "(": ")", "{": "}"}.get(parts[-1] if parts else "")
        self._is_word = bool(parts) and re.match(r"\w", parts[0]) is not None
        # After an opening bracket, a closing one ends the candidate.
        around = _AROUND.replace(r"|)\]}", "|") if self._closes else _AROUND
        self._value = re.compile(rf"{around}(?P<value>{value})", re.IGNORECASE)
        claim = f"|{wording.CLAIM}" if is_word else ""
        self._line = re.compile(rf"(?:\n{wording.REVISED}{claim}){_AROUND}(?P<value>{value})", re.IGNORECASE)
        self._marker = re.compile(_of_parts(parts))
        weak = parts[:-1] if len(parts) > 1 and not re.match(r"\w", parts[-1]) else []
        # "Score (final): 8" is only for words: after a bracket, the text is free.
        marker = _of_parts(weak) + (rf"(?i:{_JOINED}|{_NAMED})" if self._is_word else _JOINED) if weak else r"(?!)"
        self._weak = re.compile(rf"{marker}(?i:{_AROUND}(?P<value>{value}))")

    def read(self, reply: str) -> Candidate:
        """Return the verdict.

        Raises:
            NoVerdictError: there is none, or it is doubtful.
        """
        whole = folded(reply)
        text = final_text(whole)
        if self._after is None:
            return self._alone(text)
        markers = self._last_markers(text, 1, _LONGEST_LAST)
        if not markers:
            raise NoVerdictError(f"no {self._after!r} was found in the reply")
        last = markers[-1]
        found = self._at(text, last)
        self._check_clause(found, last.end())
        quoted = self._is_doubtful(text, last)
        if quoted or wording.TURN.search(text, 0, last.start()):
            markers = self._last_markers(text, MOST_DRAFTS + 1, _LONGEST_REST)
        else:  # only a draft directly before it counts
            markers = [*self._marker.finditer(text, max(0, last.start() - _LONGEST_DRAFT), last.start()), last]
        earlier = markers[-2 : -2 - (MOST_DRAFTS if quoted else 1) : -1]
        check_last(found, [self._draft(text, marker) for marker in earlier], quoted)
        self._check_rest(found)
        # `whole` has the reasoning, too, and its positions are those of `text`.
        if self._marker.search(whole, found.end):
            raise NoVerdictError(f"reasoning with another verdict follows the last one: {found.shown}")
        return found

    def _last_markers(self, text: str, count: int, length: int) -> list[re.Match[str]]:
        """Return the last markers, without a search of the whole text if the last ``length`` characters have enough."""
        while True:
            start = max(0, len(text) - length)
            # Not a slice of the text: the look-behinds must see what stands before it.
            markers = list(self._marker.finditer(text, start))
            if len(markers) >= count or not start:
                return markers
            # So the shorter searches before add little to the last one.
            length *= 8

    def _at(self, text: str, marker: re.Match[str]) -> Candidate:
        match = self._value.match(text, marker.end())
        if match is None:
            shown = _shown(text, marker.end())
            raise NoVerdictError(f"no single {self._what} follows the last {self._after!r}: {shown}")
        return Candidate(text, marker.start(), match.start("value"), match.end(), *self._convert(match))

    def _draft(self, text: str, marker: re.Match[str]) -> Candidate | None:
        try:
            return self._at(text, marker)
        except NoVerdictError:
            return None

    def _check_clause(self, found: Candidate, marker_end: int) -> None:
        """Check that nothing qualifies the value: rule 3."""
        closed = _CLOSED.match(found.text, found.end)
        assert closed is not None
        end = closed.end()
        if points := wording.POINTS.match(found.text, end):
            closed_again = _CLOSED.match(found.text, points.end())
            assert closed_again is not None
            end = closed_again.end()
        rest = found.text[end : end + 400]
        if self._closes:
            # The bracket is closed within the value in \\boxed{7}/10.
            is_closed = self._closes in found.text[found.start : closed.end()]
            is_plain = (is_closed or rest.startswith(f" {self._closes}")) and not rest.startswith("?")
        elif "\n" in found.text[marker_end : found.start]:
            is_plain = wording.ENDS_LINE.match(rest) is not None
        else:
            is_plain = self._is_plain(rest, found)
        signs = found.text[marker_end : found.start]
        if not is_plain or not (self._are_fitting(signs, found) or self._closes):
            raise NoVerdictError(f"the last verdict is not a single {self._what}: {found.shown}")

    def _are_fitting(self, text: str, found: Candidate) -> bool:
        return wording.DOUBTED.isdisjoint(text) and (found.score == self._lowest or not set(_CROSSED) & set(text))

    def _is_plain(self, rest: str, found: Candidate) -> bool:
        if wording.ENDS_SENTENCE.match(rest) or wording.REASON.match(rest):
            return True
        if not wording.BEGINS_PROSE.match(rest):
            return False
        clause = wording.FAULTLESS.sub("", re.split(r"\u3002|[.!](?=[\s*_\"'`)]|\Z)|\n", rest, maxsplit=1)[0])
        if self._ignored is not None:
            clause = wording.STYLE.sub("", self._ignored.sub("", clause))
        if found.score == self._lowest:
            clause = wording.CONCEDED.sub("", clause)
        if not self._is_choice:
            clause = wording.REMARK.sub("", clause)
            clause = wording.FLAW.sub(" ", clause if self._is_extreme(found) else wording.DEGREE.sub("", clause))
        is_harmless = wording.HARMLESS.match(clause) is not None
        is_open = self._is_choice and wording.DIRECT.match(clause) and not is_harmless
        if is_open or (self._is_choice and wording.RESERVATIONS.match(clause)):
            return False
        words = [word.lower() for word in re.findall(r"[^\W_]+", clause[:100])[:2]]
        if not re.match(r"\s*\w", rest) and words[:1] not in (["this"], ["that"], ["which"]):
            words = [*words[:1], *(word for word in words[1:] if word not in wording.PROSE)]
        if self._is_choice and not self._is_extreme(found):
            words = [word for word in words if word not in wording.PARTIAL]
        is_hedged = wording.CJK_HEDGE.match(clause) or not (wording.HEDGES.isdisjoint(words) or is_harmless)
        return self._are_fitting(clause, found) and not is_hedged and not self._rivals(clause, found.verdict)

    def _is_extreme(self, found: Candidate) -> bool:
        return found.score is None or not self._lowest < found.score < self._highest

    def _is_doubtful(self, text: str, marker: re.Match[str]) -> bool:
        """Return whether a candidate is quoted, or has a name of its own: rule 5."""
        start = marker.start()
        before = text[max(0, start - 60) : start].rpartition("\n")[2]
        in_code = (text.count("```", 0, start) + text.count("~~~", 0, start)) % 2 == 1
        if (in_code and not _WHOLE_BLOCK.fullmatch(text)) or is_quoted(text, start, marker[0]):
            return True
        stripped = before.rstrip(" \t*_~`(")
        words = re.split(r"[^\w\s*~`]", before.rstrip(" \t*_~`:"))[-1].lower().split()
        last = next((word for word in reversed(words) if word not in wording.NEUTRAL), None)
        if last in wording.DENIALS:
            raise NoVerdictError(f"the word {last!r} before it qualifies the last verdict: {_shown(text, start)}")
        letters = sum(1 for _ in takewhile(str.isalnum, reversed(stripped)))
        word = stripped[len(stripped) - letters :].lower()
        if word in wording.DENIALS:
            place = start - len(before) + len(stripped) - letters
            raise NoVerdictError(f"the word before it qualifies the last verdict: {_shown(text, place)}")
        if not self._is_word:
            return False
        is_attached = before[-1:] == "." and before[-2:-1].isalnum()
        return is_attached or (word != "" and word not in wording.NEUTRAL)

    def _check_rest(self, found: Candidate) -> None:
        """Check that nothing after the value contradicts it: rule 6."""
        if len(found.text) - found.end > _LONGEST_REST:
            raise NoVerdictError(f"more than {_LONGEST_REST} characters follow the last verdict: {found.shown}")
        lines = self._line.finditer(found.text, found.end)
        alone = [line for line in lines if wording.ENDS_LINE.match(found.text, line.end())]
        for other in [*self._weak.finditer(found.text, found.end), *alone]:
            try:
                differs = self._convert(other)[0] != found.verdict
            except NoVerdictError:  # a number out of range, for example, contradicts, too
                differs = True
            is_missed = wording.MISSED.match(found.text, other.end()) and wording.HIGHER.search(
                found.text, max(0, other.start() - 40), other.start()
            )
            if differs and not is_missed:
                shown = _shown(found.text, other.start())
                raise NoVerdictError(f"the text after {found.shown} contradicts it: {shown}")

    def _alone(self, text: str) -> Candidate:
        """Return the value that is alone in the last line; the line before must not be another value alone."""
        text = text.rstrip()
        found = self._at_end(text)
        if found is None:
            shown = _shown(text, text.rfind("\n") + 1)
            raise NoVerdictError(f"the last line is not a single {self._what}: {shown}")
        # A line in a code block or between quotation marks.
        if is_quoted(text, found.begin) or text.count("`", 0, found.begin) % 2:
            raise NoVerdictError(f"the last line may be a quote: {found.shown}")
        draft = None
        with suppress(NoVerdictError):
            draft = self._at_end(text[: found.begin].rstrip())
        check_last(found, [draft], quoted=False)
        return found

    def _at_end(self, text: str) -> Candidate | None:
        begin = text.rfind("\n") + 1
        match = self._value.match(text, begin)
        if match is None or not wording.ENDS_LINE.fullmatch(text, match.end()):
            return None
        return Candidate(text, begin, match.start("value"), match.end(), *self._convert(match))


def _of_parts(parts: Sequence[str]) -> str:
    """Return a pattern for the parts of a marker, with markup in and between them, at the beginning of a word.

    It begins with a set of characters, without the flag IGNORECASE, so that `re` searches fast for its beginning.
    """
    if not parts:
        return r"(?!)"
    first = re.escape(parts[0][0].lower()) + re.escape(parts[0][0].upper())
    words = [(r"[*`~]{0,4}+" if "_" in part else r"[*_`~]{0,4}+").join(map(re.escape, part)) for part in parts]
    rest = _INSIDE.join(words)[len(re.escape(parts[0][0])) :]
    return rf"[{first}]" + (_BOUNDARY if re.match(r"\w", parts[0]) else "") + rf"(?i:{rest})"
