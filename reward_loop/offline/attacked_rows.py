"""The rows that an attack makes answers from: their type, their answer, and the forms in which functions expect it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

FORMS = (
    *("#### {}", "\\boxed{{}}", "<answer>{}</answer>", "Answer: {}", "A: {}", "<answer>\\boxed{{}}</answer>", "**{}**"),
    *("<think>\nSo.\n</think>\n\\boxed{{}}", "<think>\nSo.\n</think>\n<answer>{}</answer>", "Final answer: {}"),
    *("```python\n{}\n```", "```json\n{}\n```", "{}", "The answer is {}.", "The answer is {}", "${}$"),
)
"""The forms in which functions expect an answer: ``{}`` stands for it."""
PROSE = ("{}", "The answer is {}.", "The answer is {}")
"""The forms without a marker."""

_NUMBER = r"\s*[$€]?\s*([-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d{1,3})?)(?:/(\d+))?\s*(%|°?[A-Za-z]*)\.?\s*"
_LETTER = r"\(?[A-Ja-j]\)?\.?"
_TRUTHS = {"true": "yes", "false": "no"}
_PLAIN_UP_TO = 10_000
"""The longest text that `plain` changes, in characters."""
_ANSWERS = {"number": r"-?\d[\d,]*(?:\.\d+)?", "choice": r"\b[A-J]\b"}


@dataclass(frozen=True)
class AttackedRow:
    """A row of the data, with the form in which the function accepts the answer ``text``."""

    reference: Any
    prompt: str = ""
    response: str = ""
    others: tuple[str, ...] = ()
    """Answers of other rows: wrong ones here."""
    bodies: tuple[str, ...] = ()
    """Responses of other rows, with ``{}`` in place of their answer."""
    aliases: tuple[str, ...] = ()
    """The reference's other answers: right ones, too."""
    type: str = ""
    text: str = ""
    form: str = "{}"

    def put(self, text: str) -> str:
        """Return an answer: the text in the form that the function accepts."""
        return self.form.replace("{}", text)

    def is_right(self, answer: str) -> bool:
        """Return whether an answer is a reference, or an equal text, in the form that the function accepts."""
        head, _, tail = self.form.partition("{}")
        within = answer.removeprefix(head).removesuffix(tail)
        texts = (self.text, *self.aliases)
        if self.type == "json":  # where spaces are no matter, but case is
            return within in texts
        said = plain(within)
        return any(said == plain(text) or answer == self.put(text) for text in texts)

    @property
    def other(self) -> str:
        """A wrong answer of the same kind."""
        return self.others[0] if self.others else changed(self.text)


def number(text: str) -> Fraction | None:
    """Return the value of ``1,000``, ``$5``, ``1/2``, ``50%`` or ``5 km``; ``None`` for other texts."""
    found = re.fullmatch(_NUMBER, text)
    if not found or (found[2] and not int(found[2])) or len(found[1]) > 40:
        return None
    return Fraction(found[1].replace(",", "")) / int(found[2] or 1)


def same(one: str, other: str) -> bool:
    """Return whether two answers have the same value, or the same text; see `plain`."""
    one, other = plain(one), plain(other)
    x, y = number(one), number(other)
    return x == y if x is not None and y is not None else one == other


@functools.lru_cache(maxsize=4096)  # some references have dozens of right answers
def plain(text: str) -> str:
    """Return a text without what sound functions ignore: case, spaces, articles, marks, ``$``, and forms of LaTeX."""
    if len(text) > _PLAIN_UP_TO:
        return text
    text = re.sub(r"\\(?:left|right|displaystyle|[!,;: ])|\$", "", text.lower())
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|(\d)\s*(\d))", _slash, text)
    text = re.sub(r"^\s*[a-z]\s*=(?![=])|\b(?:a|an|the)\s+(?=\w)", "", text)
    text = re.sub(r"(?<=[a-z])\.(?=[a-z]|\s|$)|\.\s*$", "", text)
    text = re.sub(r"\s+", "", text)
    text = _TRUTHS.get(text, text)
    return text[1:-1] if re.fullmatch(r"\(\w\)", text) else text


def _slash(found: re.Match[str]) -> str:
    return f"{found[1] or found[3]}/{found[2] or found[4]}"


def changed(text: str) -> str:
    """Return another answer of the same kind: one digit or letter differs."""
    for place in reversed(range(len(text))):
        if text[place].isdigit():
            return f"{text[:place]}{(int(text[place]) + 3) % 10}{text[place + 1 :]}"
    return ("B" if text != "B" else "C") if len(text) == 1 else text[:-1] + ("x" if text[-1:] != "x" else "y")


def texts_of(reference: Any) -> list[str]:
    """Return what may be the answer within a reference, the likeliest first."""
    if hasattr(reference, "tolist"):
        reference = reference.tolist()
    if isinstance(reference, Mapping) and len(reference) == 1:
        return texts_of(next(iter(reference.values())))
    if isinstance(reference, list | tuple) and reference and all(isinstance(item, str) for item in reference):
        return list(reference)
    if isinstance(reference, Mapping | list | tuple):
        return [json.dumps(reference, default=str)]
    text = str(reference).strip()
    patterns = (r"####\s*(.+?)\s*$", r"\\boxed\{(.*)\}", r"<answer>\s*(.*?)\s*</answer>")
    found = [match[1] for pattern in patterns if (match := re.search(pattern, text, re.DOTALL))]
    return [*found, text, *([text.replace(",", "")] if number(text) is not None and "," in text else [])]


def type_of(reference: Any, references: Sequence[str] = ()) -> str:
    """Return the type of a reference; other rows decide what it leaves open: a letter is a choice if others are."""
    text = texts_of(reference)[0]
    tests = isinstance(reference, Mapping) and bool({"inputs", "outputs", "test_list"} & set(reference))
    if tests or re.search(r"^\s*(assert |def \w+\(|class \w+[:(]|import \w+\s*$|from \w+ import )", text, re.MULTILINE):
        return "program"
    if re.fullmatch(_LETTER, text):
        letters = sum(bool(re.fullmatch(_LETTER, one)) for one in references)
        return "choice" if letters >= 0.9 * len(references) else "word"
    if text[:1] in ("{", "[") and _is_json(text):
        return "json"
    if number(text) is not None:
        return "number"
    is_expression = re.search(r"\\[a-zA-Z{]|\^|_\{|[a-z0-9)]\s*[-+*/=]\s*[a-z0-9(\\]|^[\[(].*,.*[\])]$", text)
    return "expression" if is_expression else "word"


def rows_of(rows: Sequence[tuple[Any, str, str]]) -> list[AttackedRow]:
    """Return the rows to attack, from each row's reference, prompt and response."""
    references = [texts_of(reference)[0] for reference, _, _ in rows]
    made = []
    for index, (reference, prompt, response) in enumerate(rows):
        kind = type_of(reference, references)
        text = response if kind == "program" else references[index]
        aliases = texts_of(reference)
        # A file has several responses to the same prompt, and any of them may be right.
        around = [
            one
            for one in (*range(index + 1, len(rows)), *range(index))
            if references[one] and not any(same(references[one], alias) for alias in aliases)
        ]
        answers = [rows[one][2] if kind == "program" else references[one] for one in around]
        others = [one for one in dict.fromkeys(answers) if one and not same(one, text)]
        # Of answers that are related to this one, a finding would be blamed on the wrong kind.
        others.sort(key=lambda other: _is_related(other, text))
        bodies = [
            head + "{}" + tail
            for one in around
            for head, answer, tail in [rows[one][2].rpartition(references[one])]
            if answer and kind != "program" and not _holds(head + tail, text)
        ]
        found = tuple(others[:8]), tuple(bodies[:4]), tuple(aliases)
        made.append(AttackedRow(reference, prompt, response, *found, kind, text))
    return made


def forms_of(row: AttackedRow) -> list[str]:
    """Return the forms that a row's response suggests: its line with the answer, and the whole of it."""
    head, found, tail = row.response.rpartition(row.text) if row.text else ("", "", "")
    if not found and (answers := list(re.finditer(_ANSWERS.get(row.type, r"(?!)"), row.response))):
        head, found, tail = row.response[: answers[-1].start()], "x", row.response[answers[-1].end() :]
    if not found or row.type == "program":
        return []
    return [head.rpartition("\n")[2] + "{}" + tail.partition("\n")[0], head + "{}" + tail]


def _holds(text: str, answer: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


def _is_related(one: str, other: str) -> bool:
    x, y = number(one), number(other)
    if x and y and (abs(x - y) <= abs(y) / 4 or max(abs(x / y), abs(y / x)) in (10, 100)):
        return True
    return one.lower() in other.lower() or other.lower() in one.lower()


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
