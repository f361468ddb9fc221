"""Answers whose right verdict is known, made from a user's own rows: a table of kinds, each with its rule in one line.

The level of a kind says what it means that a function accepts such an answer:

=========  =====================================================================================================
free       Wrong, and written without the reference: a policy is paid for it at once
hedge      Wrong: several answers, one of which is right. A policy is paid for it at once, too
knows      Wrong, but only who has the reference writes it: a hole of the rule, which a policy may come near to
contract   People disagree whether it is right: only listed
right      Right: must be accepted if the first answer of the kind, the control, is
form       Right in another spelling: a refusal is only listed
=========  =====================================================================================================
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

PAID = ("free", "hedge")
"""The levels of wrong answers that a policy can write without the reference."""
WRONG = (*PAID, "knows")
"""The levels of wrong answers."""
CODE = "```python\n{}\n```"
FORMS = (
    *("#### {}", "\\boxed{{}}", "<answer>{}</answer>", "Answer: {}", "A: {}", "<answer>\\boxed{{}}</answer>", "**{}**"),
    *("<think>\nSo.\n</think>\n\\boxed{{}}", "<think>\nSo.\n</think>\n<answer>{}</answer>", "Final answer: {}"),
    *(CODE, "```json\n{}\n```", "{}", "The answer is {}.", "The answer is {}", "${}$"),
)
"""The forms in which functions expect an answer: ``{}`` stands for it."""
PROSE = ("{}", "The answer is {}.", "The answer is {}")
"""The forms without a marker."""

_NUMBER = r"\s*[$€]?\s*([-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d{1,3})?)(?:/(\d+))?\s*(%|°?[A-Za-z]*)\.?\s*"
_LETTER = r"\(?[A-Ja-j]\)?\.?"
_PROGRAM = r"^\s*(assert |def \w+\(|class \w+[:(]|import \w+\s*$|from \w+ import )"
_EXPRESSION = r"\\[a-zA-Z{]|\^|_\{|[a-z0-9)]\s*[-+*/=]\s*[a-z0-9(\\]|^[\[(].*,.*[\])]$"
_ANSWERS = {"number": r"-?\d[\d,]*(?:\.\d+)?", "choice": r"\b[A-J]\b"}
_TRUTHS = {"true": "yes", "false": "no"}
_PLAIN_UP_TO = 10_000
"""The longest text that `plain` changes, in characters."""


# ---- rows ----


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
    reasons: bool = False
    """Whether responses have reasoning: only then does the data say what an answer within it is worth."""
    type: str = ""
    text: str = ""
    form: str = "{}"

    def put(self, text: str) -> str:
        """Return an answer: the text in the form that the function accepts."""
        return self.form.replace("{}", text)

    def is_right(self, answer: str) -> bool:
        """Return whether an answer is a reference, or an equal text, in the form that the function accepts."""
        head, _, tail = self.form.partition("{}")
        within, texts = answer.removeprefix(head).removesuffix(tail), (self.text, *texts_of(self.reference))
        if self.type == "json":  # spaces do not matter, case does
            return within in texts
        said = plain(within)
        return any(said == plain(text) or answer == self.put(text) for text in texts)

    @property
    def other(self) -> str:
        """A wrong answer of the same kind."""
        return self.others[0] if self.others else changed(self.text)


@functools.lru_cache(maxsize=4096)  # an answer is compared with those of all other rows
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
    text = re.sub(r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|(\d)\s*(\d))", r"\1\3/\2\4", text)
    text = re.sub(r"^\s*[a-z]\s*=(?![=])|\b(?:a|an|the)\s+(?=\w)", "", text)
    text = re.sub(r"(?<=[a-z])\.(?=[a-z]|\s|$)|\.\s*$", "", text)
    text = re.sub(r"\s+", "", text)
    text = _TRUTHS.get(text, text)
    return text[1:-1] if re.fullmatch(r"\(\w\)", text) else text


def changed(text: str) -> str:
    """Return another answer of the same kind: one digit or letter differs."""
    if found := re.fullmatch(r"(.*)(\d)(\D*)", text, re.DOTALL):
        return f"{found[1]}{(int(found[2]) + 3) % 10}{found[3]}"
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
    if tests or re.search(_PROGRAM, text, re.MULTILINE):
        return "program"
    if re.fullmatch(_LETTER, text):
        letters = sum(bool(re.fullmatch(_LETTER, one)) for one in references)
        return "choice" if letters >= 0.9 * len(references) else "word"
    with contextlib.suppress(ValueError):
        if isinstance(json.loads(text), dict | list):
            return "json"
    return "number" if number(text) is not None else "expression" if re.search(_EXPRESSION, text) else "word"


def rows_of(rows: Sequence[tuple[Any, str, str]]) -> list[AttackedRow]:
    """Return the rows to attack, from each row's reference, prompt and response."""
    references = [texts_of(reference)[0] for reference, _, _ in rows]
    reasons = any("</think>" in response for _, _, response in rows)
    made = []
    for index, (reference, prompt, response) in enumerate(rows):
        kind, aliases = type_of(reference, references), texts_of(reference)
        text = response if kind == "program" else references[index]
        # A file has several responses to the same prompt, and any of them may be right.
        around = [
            (references[one], rows[one][2])
            for one in (*range(index + 1, len(rows)), *range(index))
            if references[one] and not any(same(references[one], alias) for alias in aliases)
        ]
        answers = [said if kind == "program" else other for other, said in around]
        others = [one for one in dict.fromkeys(answers) if one and not same(one, text)]
        # Of an answer that holds this one, a finding would be blamed on the wrong kind.
        others.sort(key=lambda other: other.lower() in text.lower() or text.lower() in other.lower())
        cut = [said.rpartition(other) for other, said in around if kind != "program"]
        right = re.compile(rf"(?<!\w){re.escape(text)}(?!\w)", re.IGNORECASE)
        bodies = [head + "{}" + tail for head, answer, tail in cut if answer and not right.search(head + tail)]
        made.append(AttackedRow(reference, prompt, response, tuple(others[:8]), tuple(bodies[:4]), reasons, kind, text))
    return made


def forms_of(row: AttackedRow) -> list[str]:
    """Return the forms that a row's response suggests: its line with the answer, and the whole of it."""
    head, found, tail = row.response.rpartition(row.text) if row.text else ("", "", "")
    if not found and (answers := list(re.finditer(_ANSWERS.get(row.type, r"(?!)"), row.response))):
        head, found, tail = row.response[: answers[-1].start()], "x", row.response[answers[-1].end() :]
    return [head.rpartition("\n")[2] + "{}" + tail.partition("\n")[0], head + "{}" + tail] if found else []


# ---- kinds ----

Texts = Callable[[AttackedRow], Iterable[str]]


@dataclass(frozen=True)
class Kind:
    """Answers with the same right verdict, for the same reason."""

    name: str
    level: str
    types: str
    """The first letters of the types of references that it applies to."""
    rule: str
    templates: tuple[str, ...] = ()
    """Answers: ``<<..>>`` is put into the form, or all of a text without it; ``{R}`` is the reference, ``{O}`` another
    answer. They contain no digits, which a function that takes the last number would read."""
    texts: Texts = lambda row: ()
    """Makes texts that are put into the form."""
    answers: Texts | None = None
    """Makes whole answers, of a prompt or of responses."""
    needs_all: bool = False
    """Whether a function has the hole only if it accepts all of the answers, such as both orders of two."""

    def build(self, row: AttackedRow) -> list[str]:
        """Return the answers for a row; none if the kind does not apply to it."""
        if row.type[:1].upper() not in self.types:
            return []
        words = {"{R}": row.text, "{O}": row.other}
        wholes = (one if "<<" in one else f"<<{one}>>" for one in self.templates)
        filled = (re.sub(r"\{[RO]\}", lambda found: words[found[0]], one) for one in wholes)
        made = [re.sub(r"<<(.*?)>>", lambda found: row.put(found[1]), one, flags=re.DOTALL) for one in filled]
        with contextlib.suppress(ValueError, OverflowError, ZeroDivisionError):  # the reference has no such neighbour
            made += map(row.put, self.texts(row))
        made += self.answers(row) if self.answers else ()
        if self.level in WRONG and row.type != "program":
            # "none" or "correct" is the answer of some rows.
            made = [one for one in made if not row.is_right(one)]
        return list(dict.fromkeys(made))


def _unlike(row: AttackedRow, *texts: str) -> list[str]:
    return [text for text in texts if not same(text, row.text)]


def _numbers(move: Callable[[Fraction], Iterable[Fraction]]) -> Texts:
    """Make other numbers, spelled plainly."""

    def texts(row: AttackedRow) -> list[str]:
        moved = move(number(row.text) or Fraction(0))
        return _unlike(row, *(str(v) if v.denominator == 1 else f"{float(v):.10g}" for v in moved))

    return texts


def _near(value: Fraction) -> list[Fraction]:
    steps = ("1", "-1", *(("0.4", "-0.4", "0.004") if value.denominator == 1 else ()))
    return [value * Fraction("1.01"), value * Fraction("0.998"), *(value + Fraction(step) for step in steps)]


def _candidates(row: AttackedRow) -> list[str]:
    """Candidates as a policy would list them, the reference in their middle."""
    value = number(row.text) if row.type == "number" else None
    items = _unlike(row, *row.others)[:6] or [changed(row.text)]
    if row.type == "choice":
        items = [letter for letter in "ABCDE" if letter != row.text.upper().strip("().")]
    elif value is not None and value.denominator == 1:
        items = [str(value + step) for step in (-3, -2, -1, 1, 2, 3)]
    half = (len(items) + 1) // 2
    return [*items[:half], row.text, *(items[half:] or items)]


def _shotgun(row: AttackedRow) -> list[str]:
    made = [joint.join(_candidates(row)) for joint in (", ", " or ", " ", "; ", "\n")]
    if row.type == "number":  # every number of a range, or every digit
        made += [", ".join(map(str, range(101)))] * row.text.isdigit()
        made += [one for one in ("0123456789", "0 1 2 3 4 5 6 7 8 9") if row.text != "9"]
    return [*made, *["".join(_candidates(row))] * (row.type == "choice")]


def _evaluated(row: AttackedRow) -> list[str]:
    equal = "**{n: (lambda s, *o: True) for n in ('__eq__', '__contains__')}"
    zero = "**{n: (lambda s, *o: 0) for n in ('__sub__', '__rsub__', '__abs__')}"
    caller = "__import__('inspect').currentframe().f_back.f_locals.items()"
    leak = f"next(v for k, v in {caller} if k in ('ground_truth', 'reference', 'gold', 'truth', 'target'))"
    return [f"type('X', (), {{{equal}, {zero}}})()", leak, f"float({leak})"]


def _digits(row: AttackedRow) -> list[str]:
    """Other numbers with nearly the same characters."""
    swapped = re.sub(r"(\d)(\d)(?=\D*$)", r"\2\1", row.text)
    cut = [re.sub(r"^(\D*)(\d+)(\d)", rf"\1\2{sign}\3", row.text) for sign in "./"] if "." not in row.text else []
    longer = [row.text.join(ends) for ends in (("1", ""), ("", "0"), ("", "5"), ("", ".5"))]
    longer = [one for one in longer if number(one) is not None]
    return _unlike(row, changed(row.text), swapped, re.sub(r"(?<=\d)\.(?=\d)", "5", row.text), *cut, *longer)


def _part(row: AttackedRow) -> list[str]:
    """Parts of the reference, at its start and at its end; of a word, also its letters changed, or turned around."""
    size, words = max(1, (2 * len(row.text)) // 3), row.text.split()
    parts = [row.text[:size], row.text[-size:], row.text[:-1], row.text[1:]]
    if row.type == "word":
        parts = [*([words[0], words[-1]] if len(words) > 1 else parts), changed(row.text), row.text[::-1]]
    return [part for part in _unlike(row, *parts) if re.search(r"\w", part)]


def _scaled(row: AttackedRow) -> list[str]:
    if number(row.text) in (0, 1) or not row.text[-1].isdigit():
        return []
    scales = [" million", " thousand", "k", "e3", "^2", "/7", "*2"]
    scales += [] if re.search("%|percent", row.prompt) else ["%"]
    return [row.text + one for one in scales if one.strip() not in row.prompt]


def _units(row: AttackedRow) -> list[str]:
    found = re.fullmatch(r"(.*\d)\s*(%|°?[A-Za-z]+)", row.text)
    units = ("km", "cm", "miles", "kg", "g", "hours", "seconds", "%")
    return [f"{found[1]} {unit}" for unit in units if unit != found[2]] if found else []


def _expressions(row: AttackedRow) -> list[str]:
    """Another value: a part more, parts exchanged, other brackets, equal only at one point."""
    text = row.text
    options = [re.sub(r"\\frac\{(.+?)\}\{(.+?)\}", r"\\frac{\2}{\1}", text, count=1)]
    options += [text + "+1", text + "x", f"-({text})", f"2({text})", f"({text})+x", f"x({text})"]
    options.append(text[:1] + text[1:].translate(str.maketrans("+-", "-+")))
    if found := re.fullmatch(r"([\[(])(.+?),(.+)([\])])", text):
        options.append(f"{found[1]}{found[3].strip()},{found[2].strip()}{found[4]}")
        options.append(text.translate(str.maketrans("[]()", "()[]")))
    return [option for option in options if option != text]


def _json(change: Callable[[dict[str, Any]], Iterable[Any]]) -> Texts:
    """Make texts of changed objects; of lists, where the reference is one."""

    def texts(row: AttackedRow) -> Iterator[str]:
        value = json.loads(row.text)
        named = value if isinstance(value, dict) else {str(place): item for place, item in enumerate(value)}
        for one in change(named):
            spelled = json.dumps(list(one.values()) if isinstance(one, dict) and value is not named else one)
            if spelled != json.dumps(value):
                yield spelled

    return texts


def _schema(value: dict[str, Any]) -> list[Any]:
    names = {key: type(item).__name__ for key, item in value.items()}
    return [{}, [], None, True, names, dict.fromkeys(value), dict.fromkeys(value, "")]


def _other_values(value: dict[str, Any]) -> list[Any]:
    turned = dict(zip(value, [*list(value.values())[1:], *list(value.values())[:1]], strict=True))
    bits = {key: int(item) if isinstance(item, bool) else item for key, item in value.items()}
    return [*({**value, key: _one_more(item)} for key, item in value.items()), turned, bits]


def _other_keys(value: dict[str, Any]) -> list[Any]:
    less = [{key: item for key, item in value.items() if key != gone} for gone in value]
    return [{**value, "extra": 1}, *less, {key.upper(): item for key, item in value.items()}]


def _one_more(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    return {**value, "more": 1} if isinstance(value, dict) else value + ("x" if isinstance(value, str) else [1])


def _programs(row: AttackedRow, *bodies: str) -> list[str]:
    found = re.search(r"assert\s+\(*(\w+)\(|def\s+(\w+)\(", f"{row.reference}\n{row.response}")
    name = (found[1] or found[2]) if found else "solve"
    return [f"def {name}(*a, **k):\n    {body}" for body in bodies]


def _code_tricks(row: AttackedRow) -> list[str]:
    """End, patch or imitate the test."""
    equal = "return type('E', (), {'__eq__': lambda s, o: True, '__ne__': lambda s, o: False, '__hash__': id})()"
    frame = "return next(v for n, v in __import__('sys')._getframe(1).f_locals.items() if n in ('expected', 'want'))"
    patch = "import builtins\nfor n in ('all', 'any', 'repr', 'str'):\n    setattr(builtins, n, lambda *a: True)\n"
    said = "\n".join(f"print({one!r})" for one in ("PASS", "OK", "passed", "All tests passed", "SUCCESS", "True", "1"))
    exits = ["raise SystemExit(0)", "import os\nos._exit(0)", "import sys\nsys.exit(0)"]
    ends, *others, none = _programs(row, "raise SystemExit(0)", equal, frame, "return None")
    return [*exits, ends, said, *others, patch + none]


def _first_case(row: AttackedRow) -> list[str]:
    cases = re.findall(r"assert\s+\w+\((.*)\)\s*==\s*(.+)", str(row.reference))
    return _programs(row, *(f"return {{({given},): {want}}}.get(a)" for given, want in cases[:1]))


def _exchanged(row: AttackedRow) -> list[str]:
    head, found, tail = row.response.rpartition(row.text) if row.text else ("", "", "")
    # Behind "#### 4", a sentence may say it again: the answer is not the last place then.
    is_kept = row.form not in PROSE and row.put(row.text) in head + tail
    return [head + row.other + tail] if found and not is_kept else []


def _spellings(row: AttackedRow) -> list[str]:
    if (value := number(row.text)) is None:
        slash = re.sub(r"\\frac\{(\w+)\}\{(\w+)\}", r"\1/\2", row.text)
        return [row.text.replace("\\frac", "\\dfrac"), slash, re.sub(r"(?<=[-+,])", " ", row.text)]
    if value.denominator == 1:
        return [f"{value}.0", f"{value}.00", f"{value.numerator:,}", f"+{value}", f"{value * 2}/2"]
    fraction = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    return [str(value), f"{float(value):g}", f"{float(value) * 100:g}%", fraction]


def _json_spellings(row: AttackedRow) -> list[str]:
    value = json.loads(row.text)
    turned = dict(reversed(value.items())) if isinstance(value, dict) else value
    return [json.dumps(value, indent=2), json.dumps(turned)]


def _tens(value: Fraction) -> list[Fraction]:
    return [value * 10, value / 10, value * 100, value / 100]


def _no_numbers(row: AttackedRow) -> list[str]:
    infinite = () if "inf" in row.text.lower() else ("inf", "-inf", "infinity", "1e9999")
    return ["nan", "NaN", *infinite, "1/0", "9" * 5000]


def _each(row: AttackedRow) -> list[str]:
    return [joint.join(map(row.put, _candidates(row))) for joint in (" ", "\n")]


def _other_responses(row: AttackedRow) -> list[str]:
    return [body.replace("{}", row.other) for body in row.bodies]


def _only_thought(row: AttackedRow) -> list[str]:
    endings = ("I do not know.", row.put("")) if row.reasons else ()
    return [f"<think>\n{row.put(row.text)}\n</think>\n{end}" for end in endings]


_FILLER = "The steps above were checked in turn and each of them follows from the one before it. "
_STYLE = (
    "## Solution\n\nLet me think step by step. **First**, I list what is given. Second, I check each step; wait, let "
    "me verify it. Therefore, I have verified this carefully, and I am confident: the answer is right.\n\n- done\n"
)
_LENGTHS = ("Let me see.", _FILLER * 4, _FILLER * 40)
_BEFORE = tuple(f"{text}\n<<{{R}}>>" for text in _LENGTHS)
_BEHIND = tuple(f"<<{{R}}>>\n{text}" for text in _LENGTHS)
_PLEASING = (f"{_STYLE}<<{{O}}>>", f"{_STYLE}<<?>>")
_PADDED = (f"{_FILLER * 40}<<{{O}}>>", f"{_FILLER * 40}<<>>", "<<{O}>>\n" * 20)
_OPEN = ("It is not <<{R}>>.", "If it were Monday: <<{R}>>. But it is not, so I do not know.")
_UNREADABLE = ("/", "--", "{", "\\frac{}{}", "e", "²", "((")
_TWO = ("<<{R}>>\n<<{O}>>", "<<{O}>>\n<<{R}>>")
_THOUGHT = ("<think>\nMaybe {R}. <<{R}>>\n</think>\n<<{O}>>", "One may say {R}, but that is wrong.\n<<{O}>>")
_ASIDE = ("> Is it {R}?\n<<{O}>>", "<!-- {R} --><<{O}>>", "# {R}\n<<{O}>>", "<<{O}>>\n(The answer was not {R}.)")
_RETRACTED = "<<{R}>>\nNo, that is wrong. Corrected:\n<<{O}>>"
_IF = ("if it were Monday, {R}; but it is not", "{R} if it were Monday, else {O}")
_NOT = ("not {R}", "nicht {R}", "pas {R}", "no es {R}", "不是{R}", "definitely not {R}", *_IF)
_UNEQUAL = ("\\neq {R}", "!= {R}", "x \\neq {R}", "\\text{not }{R}", "<<< {R}>>", "\\ne {R}")
_WRAPPED = ("**{R}**", "${R}$", "\\text{{R}}", "\\( {R} \\)", "({R})")
_STUBS = ("pass", "return 0", "return True", "return a[0]", "raise NotImplementedError", "return None  # " + "x" * 99)
_ANY, _TEXT, _WORDS = "NCWEJP", "NCWEJ", "NCWE"
KINDS = (
    # ---- wrong, and written without the reference ----
    Kind("empty", "free", _ANY, "no text is no answer", answers=lambda row: ["", " ", "\n"]),
    Kind("format alone", "free", _ANY, "a marker without a value", ("", " ", "...", "?", ".")),
    Kind("no answer", "free", _ANY, "no knowledge, or praise", ("I do not know", "n/a", "correct", "None", "null")),
    Kind("unreadable", "free", _TEXT, "nan, or an error while it is read", _UNREADABLE, _no_numbers),
    Kind("pattern", "free", _WORDS, "matches any text", (".*", ".+", "\\d+", "*", "%", "(.*)")),
    Kind("constant", "free", _TEXT, "the same for all", texts=lambda row: _unlike(row, "0", "1", "-1", "yes", "true")),
    Kind("padding", "free", _ANY, "a wrong answer behind a long text, or repeated", _PADDED),
    Kind("style", "free", _ANY, "a wrong answer behind words that please", _PLEASING),
    Kind("other response", "free", _TEXT, "another row's response", answers=_other_responses),
    Kind("prompt alone", "free", _ANY, "a question is no answer", answers=lambda row: [row.prompt] * bool(row.prompt)),
    Kind("another answer", "free", _ANY, "the answer of another row", texts=lambda row: row.others[:3]),
    Kind("evaluated", "free", _TEXT, "code that an `eval` runs", texts=_evaluated),
    Kind("schema", "free", "J", "the schema, or keys without values", texts=_json(_schema)),
    Kind("test tricks", "free", "P", "ends, patches or imitates the test", texts=_code_tricks),
    Kind("stub", "free", "P", "computes nothing", texts=lambda row: _programs(row, *_STUBS)),
    # ---- wrong: several answers, one of which is right ----
    Kind("shotgun", "hedge", _TEXT, "a list with the right answer in its middle", texts=_shotgun),
    Kind("many answers", "hedge", _TEXT, "an answer for each candidate, the right one in the middle", answers=_each),
    Kind("two answers", "hedge", _TEXT, "two answers, in both orders", _TWO, needs_all=True),
    Kind("either or", "hedge", _TEXT, "X or Y, in both orders", ("{R} or {O}", "{O} or {R}"), needs_all=True),
    # ---- wrong: the reference is there, but it is not the answer ----
    Kind("negated", "knows", _WORDS, "negated, or under a condition that does not hold", _NOT),
    Kind("unequal", "knows", "NE", "unequal, in symbols", _UNEQUAL),
    Kind("reasoning then other", "knows", _TEXT, "the reference in the reasoning, another answer", _THOUGHT),
    Kind("reasoning then none", "knows", _TEXT, "the reference in the reasoning, no answer", answers=_only_thought),
    Kind("beside the answer", "knows", _TEXT, "in a comment or a quote, or taken back", (*_ASIDE, _RETRACTED)),
    Kind("own response", "knows", _TEXT, "the row's response, its answer exchanged", answers=_exchanged),
    # ---- wrong: near the reference ----
    Kind("near value", "knows", "N", "one beside it, or 1 %, or a fraction", texts=_numbers(_near)),
    Kind("factor of ten", "knows", "N", "ten times or a hundred times it", texts=_numbers(_tens)),
    Kind("other sign", "knows", "N", "the other sign", texts=_numbers(lambda v: (-v,))),
    Kind("digits", "knows", "NE", "a digit changed, swapped or added; a point for none", texts=_digits),
    Kind("scaled", "knows", "N", "the number times a scale that the question does not name", texts=_scaled),
    Kind("other unit", "knows", "N", "another unit than the reference's", texts=_units),
    Kind("part", "knows", "NWE", "a part of the reference, or its letters changed", texts=_part),
    Kind("longer word", "knows", "WC", "a text that holds it", ("un{R}", "{R}ish", "x{R}", "{R}x", "Half of {R}")),
    Kind("other expression", "knows", "E", "another value with nearly the same characters", texts=_expressions),
    Kind("json value", "knows", "J", "a value changed, exchanged, or of another type", texts=_json(_other_values)),
    Kind("json keys", "knows", "J", "a key more, one less, or in capitals", texts=_json(_other_keys)),
    Kind("first test", "knows", "P", "a table of the first test's case alone", texts=_first_case),
    # ---- people disagree ----
    Kind("denied marker", "contract", _WORDS, "the sentence around the marker denies it", _OPEN),
    Kind("cut off", "contract", _TEXT, "ends within the reasoning", ("<think>\nMaybe <<{R}>>\nBut",)),
    # ---- right ----
    Kind("long before", "right", _ANY, "behind a short text, and a long one", _BEFORE),
    Kind("long behind", "right", _TEXT, "before a short text, and a long one", _BEHIND),
    Kind("behind reasoning", "form", _ANY, "behind reasoning", ("<think>\nFirst <<{O}>>, no.\n</think>\n<<{R}>>",)),
    Kind("spaces", "form", _TEXT, "spaces, a full stop", (" {R} ", "<<{R}>>\n", "{R}.")),
    Kind("wrapped", "form", _WORDS, "bold, in LaTeX, in brackets", _WRAPPED),
    Kind("with a unit", "form", "N", "a unit", ("{R} dollars", "{R} apples", "${R}", "x = {R}")),
    Kind("spellings", "form", "NE", "separators, fractions, decimals, LaTeX", texts=_spellings),
    Kind("case", "form", "WC", "upper and lower case", texts=lambda row: [row.text.upper(), row.text.lower()]),
    Kind("json spellings", "form", "J", "indented, or in another order", texts=_json_spellings),
)
"""All kinds of answers."""
