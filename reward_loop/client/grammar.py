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
3. *Only the last candidate can be the verdict.* It must be understood: nothing may qualify its value, or make it an
   example (``e.g. Score: 8``), a condition, a quotation in a sentence, what another one says or asks for (``The answer
   says Score: 8``), or what the judge does not give. These qualify it: another number or word that may be the verdict
   in the same clause, a range, a unit such as ``%``, a question mark, a cross beside another than the lowest score, a
   hedge such as ``or`` or ``maybe``, also before the marker. The rest of the line may be an explanation; after
   ``because`` it is not checked.
4. *An earlier candidate is a draft*, and never replaces a last one that is not understood. It makes the last one
   doubtful if the two differ, it is not quoted, and nothing but punctuation or ``or`` stands between them, or a turn
   of the user, which the model made up.
5. *A quoted candidate*, which stands in quotation marks, a block quote, a code block or after a word such as ``wrote``,
   or which has a name of its own, such as ``Style score:``, counts only as the end of the reply, and only if no draft
   differs. A code block that is the whole reply is not a quote.
6. *Nothing after the candidate may contradict it*: neither the marker's words with another value (``The score is 3``),
   nor another value alone in a line, also after a word such as ``Revised:``, nor a sentence that takes the verdict
   back (``Wait, ...``). Of objects and matches, only such a sentence is checked.

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
from itertools import groupby, takewhile
from typing import Any, NamedTuple

__all__ = ["MOST_DRAFTS", "Candidate", "Grammar", "NoVerdictError", "check_last", "final_text", "folded", "is_quoted"]


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
            begins.pop()
    if begins:
        raise NoVerdictError(f"the reply ends in reasoning, which begins with {_shown(reply, begins[0])}")
    parts: list[str] = []
    end = 0
    for begin, next_end in blanks:
        if begin < end:  # an end without its beginning: all text before is reasoning
            parts, begin, end = [], 0, 0
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

_HEDGES = frozenset(
    re.findall(
        r"\w+",
        "or to if unless but not no nor maybe perhaps possibly probably likely at about around approx approximately "
        "roughly nearly almost would could should might may than per percent percentage cent times minus plus half "
        "hundred thousand million initially initial first tentative tentatively provisional provisionally draft guess "
        "before until versus vs however except assuming depending between higher lower more less fewer up down wait "
        "actually rather instead though otherwise is was were seems isn wasn partially partly mostly largely somewhat "
        "borderline ish out of off deducted lost below above false apart part max maximum tops min minimum example "
        "placeholder illustration uncertain unsure pending means requires",
    )
)
"""Words that qualify a value, or make it the subject of a sentence, if they are among the first two after it."""
_PROSE = frozenset(re.findall(r"\w+", "to but not no is was than more less lower higher first half out up down"))
"""Those of them that do not qualify it as the second word after a comma, a bracket or a dash."""
_DOUBTED = frozenset("?\u061f\u203d\u2047\u2048\u2049\u2753\u2754\U0001f914")
"""Signs in the clause of a value that qualify it; those of `_CROSSED` do if its score is not the lowest."""
_REASON = re.compile(r"[\s,;:(\u2012-]{1,5}(?:because|since|due\s+to|given\s+that)\b", re.IGNORECASE)
_TAKEN_BACK = re.compile(
    r"(?:[.!?\n]|\A)[\s*_>-]{0,9}(?:(?:oh|well|but)[,.]?\s)?"
    r"(?:wait|hmm+|oops|sorry|correction|scratch that|on second thoughts?|actually|rather|not really[.!]"
    r"|maybe|perhaps|or\b|no[,.:;!\u2012-]|let me re|i take (?:it|that|this) back|edit:|just kidding|my mistake"
    r"|on (?:further )?reflection|in hindsight|on closer|(?:strike|disregard|ignore) that"
    r"|i (?:(?:would|will|must|should|have to) )?(?:changed my mind|change |lower |raise |reduce |revise |downgrade "
    r"|upgrade |correct )|make (?:that|it) (?:an? )?\d|i(?:'d| would) now|(?:this|that) (?:is|was) not (?:my|the) final"
    r"|(?:the|this|that|my) (?:above )?(?:score|verdict|rating|grade)(?: above)? (?:is|was|seems) (?:only |just )?"
    r"(?:wrong|too |an? (?:example|placeholder)|not (?:my|the|final|valid)))",
    re.IGNORECASE,
)
_GAP = rf"(?:[\s\d*_\"'`.,;:/|&()\[\]{{}}<>$\\\u2012-]|(?<=```)\w{{1,9}}|{_HTML}){{0,40}}"
_BETWEEN = re.compile(rf"{_GAP}(?:(?:or|and|vs|versus)\b)?{_GAP}")
_ENDS_LINE = re.compile(r"(?:[*_\"'` \t|.!)\]}$\u2019\u201d]|\\[)\]])*+(?:\n|\Z)")
_ENDS_SENTENCE = re.compile(r"[ \t]*+(?:\n|\Z)|(?:!++|[.\u3002])(?![.\w?])")
_BEGINS_PROSE = re.compile(
    r"(?:\s++(?:[^\W\d]|[,;:(\[|<\u2012*_\"'`.!\u201c\u2300-\U0010ffff]|-\s)|[,;:](?!\w)|[(|<\u2012]|(?!\w)[\u2300-\U0010ffff]|-\s)"
)
_ENDS = re.compile(r"(?:[\s*_\"'`.!)\]}|>~$\u2019\u201d\u00bb\u300d]|\\[)\]])*+\Z")
_NEUTRAL = frozenset(
    re.findall(r"\w+", "a an and as final give hence i is it my our overall so the then therefore this thus total")
)
"""Words before a marker that do not give it another meaning."""
_DENIALS = frozenset(
    re.findall(
        r"\w+",
        "not no nor or either neither never maybe perhaps possibly probably likely max maximum min minimum previous "
        "possible threshold passing expected hypothetical reverse reversed",
    )
)
"""Words before a marker that qualify what follows."""
_NOT_SAID = re.compile(
    r"(?:\b(?:example|template|instance)|\be\.g\.|(?<!json )(?<!ed )\bformat(?:\s(?:is|was))?)[\s:,*_\"'`(]{0,6}\Z"
    r"|(?:<(?:s|del|strike)>|\b(?:not|never|reject(?:ed)?|loser|wors[et])\b)[\s:*_\"'`(]{0,6}\Z"
    r"|\bif\b[^.!?\n]{0,80}\Z"
    r"|(?:n't|n\u2019t|\bnot|\bnever|\bcannot)\s(?:\w{1,20}\s){0,2}(?:write|give|award|assign|say|output|use|deserve)"
    r"[\s:,*_\"'`(an]{0,6}\Z",
    re.IGNORECASE,
)
"""Text before a candidate that makes it an example, a condition, or what the judge does not give."""
_OTHERS = re.compile(
    r"\b(?:wrote|writes|written|says|said|states|stated|claims|claimed|quotes|quoted|contains?|contained|includes?"
    r"|asks|demands|wants|requests|instructs|tells|insists|into (?:writing|giving|saying))\b"
    r"(?:[^\S\n][^\s.,;:!?]{1,20}){0,6}?[^\S\n]?(?::\s{0,3}(?:```\w{0,9}\s)?)?[\"'`\u201c>(*_ ]{0,4}\Z"
)
"""Text before a candidate that makes it what somebody else wrote or asks for."""
_INLINE_QUOTE = re.compile(r"\w[^\n\"\u201c\u201e\u00ab\u300c]{0,60}[^\w\n][\"\u201c\u201e\u00ab\u300c][*_(]{0,3}\Z")
_LONGEST_BEFORE = 120
_TURN = re.compile(
    r"[\n\[<](?:(?<=\n)[#* ]{0,6}(?:Human|User|HUMAN|USER|Question)\b[* ]{0,4}:|(?<=\[)INST\]"
    r"|(?<=<)(?:\|im_start\||\|start_header_id\||start_of_turn)>user)"
)
"""The beginning of a turn of the user. After a verdict, it is a question that the model made up and then answers."""
_QUALIFIED = re.compile(
    r"[*_\"'`)\]}>]{0,6}[^\S\n]{0,3}(?:(?://|[(,])\s?)?"
    r"(?:[?\u061f]|(?:or|if|unless|vs|versus|loses)\b|is (?:not|worse|wrong)\b)"
)
"""Text after a candidate of any format that qualifies it."""
_REVISED = (
    r"(?:[\s#=>*_\u2012-]|(?:final(?: answer)?|overall|revised|corrected|updated|adjusted|new|total|so|thus|hence"
    r"|therefore|my|update|rating|grade|mark|verdict|judge?ment|decision|conclusion|evaluation|assessment"
    r"|i(?:'d| would) say)\b[:,=]?){0,9}+"
)
"""What may stand in a line before a value that replaces the verdict."""
_CLAIM = (
    r"[.!\n]\s{0,3}(?:(?:so|thus|hence|therefore),?\s)?the\s(?:(?:final|given|model's|student's|submitted)\s)?"
    r"(?:answer|response|solution|submission)\sis\s(?:therefore\s|thus\s|clearly\s|actually\s)?"
)
"""What may stand before a word that is another verdict."""
_SAYING = re.compile(
    r"\b(?:wrote|writes?|written|says?|said|states?|stated|claims?|claimed|quotes?|quoted|contains?|outputs|prints?"
    r"|reads?|begins?|ends?)\b(?:\s(?:with|in|as))?[\s:,*_\"'`(>]{0,6}\Z",
    re.IGNORECASE,
)
_LONGEST_SAYING = 20
_QUOTES = "\"'`\u2018\u201c\u201e\u00ab\u300c\u300e"
_WHOLE_BLOCK = re.compile(r"[\s\ufffc]*+```(?:[^`]++|`(?!``))*+```\s*+")
"""A reply that is one code block, which is then not a quote."""
_LONGEST_REST = 20_000
_LONGEST_LAST = 500
"""The number of characters at the end of a text in which the last verdict is searched first."""
_LONGEST_DRAFT = 1000
"""The largest number of characters between the beginnings of a draft and of a verdict directly after it."""
MOST_DRAFTS = 100
"""The largest number of earlier candidates that are compared, which bounds the time."""


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
    if _QUALIFIED.match(found.text, found.end):
        raise NoVerdictError(f"the text after it qualifies the last verdict: {found.shown}")
    for index, draft in enumerate(drafts):
        if draft is None or draft.verdict == found.verdict:
            continue
        is_near = index == 0 and _BETWEEN.fullmatch(found.text, draft.end, found.begin)
        if is_near and not is_quoted(found.text, draft.begin, found.text[draft.begin : draft.start]):
            raise NoVerdictError(f"the reply has two different verdicts: {_shown(found.text, draft.begin)}")
        if quoted:
            raise NoVerdictError(f"the last verdict may be a quote, and an earlier one differs: {found.shown}")
        if index == 0 and _TURN.search(found.text, draft.end, found.begin):
            raise NoVerdictError(f"a turn of the user stands between two different verdicts: {found.shown}")
    if taken_back := _TAKEN_BACK.search(found.text, found.end, found.end + _LONGEST_REST):
        shown = _shown(found.text, taken_back.start())
        raise NoVerdictError(f"the text after {found.shown} takes it back: {shown}")
    if quoted and (len(drafts) == MOST_DRAFTS or not _ENDS.match(found.text, found.end)):
        raise NoVerdictError(f"the last verdict may be a quote: {found.shown}")


def _check_before(found: Candidate) -> None:
    """Check that nothing before the candidate qualifies it: rule 3."""
    begin = max(0, found.begin - _LONGEST_BEFORE)
    before = found.text[begin : found.begin]
    line = before.rpartition("\n")[2]
    if _NOT_SAID.search(line[-60:]) or _OTHERS.search(before):
        raise NoVerdictError(f"the text before it qualifies the last verdict: {_shown(line[-60:], 0)}")
    if _INLINE_QUOTE.search(line) and '"' not in found.text[found.begin : found.start]:
        raise NoVerdictError(f"the last verdict is a quotation in a sentence: {_shown(line[-60:], 0)}")


def is_quoted(text: str, start: int, marker: str = "") -> bool:
    """Return whether a candidate is quoted: rule 5, without code blocks and names.

    Args:
        text: the text that counts.
        start: the position of the candidate's marker.
        marker: the text of the marker, which may contain the end of the quotation, as in ``"score":``.
    """
    line_start = text.rfind("\n", 0, start) + 1
    before = text[max(line_start, start - 20) : start].rstrip(" *_(")
    if not any(quote in marker for quote in _QUOTES):
        odd = text.count('"', 0, start) % 2 == 1
        if before[-1:] in (*_QUOTES,) or odd or text.rfind("\u201c", 0, start) > text.rfind("\u201d", 0, start):
            return True
    return text[line_start : min(line_start + 20, start)].lstrip().startswith(">") or bool(
        _SAYING.search(text, max(0, start - _LONGEST_SAYING), start)
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
            is_word: whether a sentence such as ``The answer is incorrect.`` may contain another verdict.
        """
        self._lowest = lowest
        self._after, self._convert, self._rivals, self._what = after, convert, rivals, what
        parts = re.findall(r"\w+|[^\w\s]", folded(after or ""))
        self._closes = {"[": "]", "(": ")", "{": "}"}.get(parts[-1] if parts else "")
        self._is_word = bool(parts) and re.match(r"\w", parts[0]) is not None
        # After an opening bracket, a closing one ends the candidate.
        around = _AROUND.replace(r"|)\]}", "|") if self._closes else _AROUND
        self._value = re.compile(rf"{around}(?P<value>{value})", re.IGNORECASE)
        claim = f"|{_CLAIM}" if is_word else ""
        self._line = re.compile(rf"(?:\n{_REVISED}{claim}){_AROUND}(?P<value>{value})", re.IGNORECASE)
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
        if quoted or _TURN.search(text, 0, last.start()):
            markers = self._last_markers(text, MOST_DRAFTS + 1, _LONGEST_REST)
        else:  # only a draft directly before it counts
            markers = [*self._marker.finditer(text, max(0, last.start() - _LONGEST_DRAFT), last.start()), last]
        earlier = markers[-2 : -2 - (MOST_DRAFTS if quoted else 1) : -1]
        check_last(found, [self._draft(text, marker) for marker in earlier], quoted)
        self._check_rest(found)
        if self._marker.search(whole, found.end):
            raise NoVerdictError(f"reasoning with another verdict follows the last one: {found.shown}")
        return found

    def _last_markers(self, text: str, count: int, length: int) -> list[re.Match[str]]:
        """Return the last markers, without a search of the whole text if the last ``length`` characters have enough."""
        while True:
            start = max(0, len(text) - length)
            markers = list(self._marker.finditer(text, start))
            if len(markers) >= count or not start:
                return markers
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
        rest = found.text[closed.end() : closed.end() + 400]
        if self._closes:
            is_plain = (self._closes in closed[0] or rest.startswith(f" {self._closes}")) and not rest.startswith("?")
        elif "\n" in found.text[marker_end : found.start]:
            is_plain = _ENDS_LINE.match(rest) is not None
        else:
            is_plain = self._is_plain(rest, found)
        signs = found.text[marker_end : found.start]
        if not is_plain or not (self._are_fitting(signs, found) or self._closes):
            raise NoVerdictError(f"the last verdict is not a single {self._what}: {found.shown}")

    def _are_fitting(self, text: str, found: Candidate) -> bool:
        return _DOUBTED.isdisjoint(text) and (found.score == self._lowest or not set(_CROSSED) & set(text))

    def _is_plain(self, rest: str, found: Candidate) -> bool:
        if _ENDS_SENTENCE.match(rest) or _REASON.match(rest):
            return True
        if not _BEGINS_PROSE.match(rest):
            return False
        clause = re.split(r"\u3002|[.!](?=[\s*_\"'`)]|\Z)|\n", rest, maxsplit=1)[0]
        words = [word.lower() for word in re.findall(r"[^\W\d_]+", clause[:100])[:2]]
        if not re.match(r"\s*\w", rest) and words[:1] not in (["this"], ["that"], ["which"]):
            words = [*words[:1], *(word for word in words[1:] if word not in _PROSE)]
        is_plain = self._are_fitting(clause, found) and _HEDGES.isdisjoint(words)
        return is_plain and not self._rivals(clause, found.verdict)

    def _is_doubtful(self, text: str, marker: re.Match[str]) -> bool:
        """Return whether a candidate is quoted, or has a name of its own: rule 5."""
        start = marker.start()
        before = text[max(0, start - 60) : start].rpartition("\n")[2]
        in_code = (text.count("```", 0, start) + text.count("~~~", 0, start)) % 2 == 1
        if (in_code and not _WHOLE_BLOCK.fullmatch(text)) or is_quoted(text, start, marker[0]):
            return True
        stripped = before.rstrip(" \t*_~`(")
        letters = sum(1 for _ in takewhile(str.isalnum, reversed(stripped)))
        word = stripped[len(stripped) - letters :].lower()
        if word in _DENIALS:
            place = start - len(before) + len(stripped) - letters
            raise NoVerdictError(f"the word before it qualifies the last verdict: {_shown(text, place)}")
        if not self._is_word:
            return False
        is_attached = before[-1:] == "." and before[-2:-1].isalnum()
        return is_attached or (word != "" and word not in _NEUTRAL)

    def _check_rest(self, found: Candidate) -> None:
        """Check that nothing after the value contradicts it: rule 6."""
        if len(found.text) - found.end > _LONGEST_REST:
            raise NoVerdictError(f"more than {_LONGEST_REST} characters follow the last verdict: {found.shown}")
        lines = self._line.finditer(found.text, found.end)
        alone = [line for line in lines if _ENDS_LINE.match(found.text, line.end())]
        for other in [*self._weak.finditer(found.text, found.end), *alone]:
            try:
                differs = self._convert(other)[0] != found.verdict
            except NoVerdictError:
                differs = True
            if differs:
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
        if match is None or not _ENDS_LINE.fullmatch(text, match.end()):
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
