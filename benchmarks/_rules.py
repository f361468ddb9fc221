"""Reward rules to attack: sound ones, ones with a hole, verl's own, and what people write; and rows for them.

A rule is a function of an answer and a reference. `SOUND` rules keep their contract, `HOLES` have one hole each, and
`LIBRARY` rules are measured as they are.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from difflib import SequenceMatcher
from typing import Any

Rule = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Entry:
    """A rule, the names of the rows that it is attacked on, and whether rewardlint's numeric cases apply to it."""

    rule: Rule
    rows: tuple[str, ...]
    numeric: bool = True


# ---- how an answer is found ----


def thought(text: str) -> str:
    return text.rpartition("</think>")[2]


def last_line(text: str) -> str:
    return (thought(text).strip().splitlines() or [""])[-1].strip()


def hashes(text: str) -> str:
    found = re.fullmatch(r"####\s*(.+)", last_line(text))
    return found[1] if found else ""


def boxes(text: str) -> list[str]:
    """The contents of all boxes, with balanced braces."""
    found = []
    for start in (match.end() for match in re.finditer(r"\\boxed\{", text)):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                found.append(text[start:place])
                break
    return found


def box(text: str) -> str:
    found = boxes(thought(text))
    return found[0] if len(found) == 1 else ""


def tag(text: str) -> str:
    found = re.findall(r"<answer>(.*?)</answer>", thought(text), re.DOTALL)
    return found[-1].strip() if found else ""


def line(text: str) -> str:
    found = re.fullmatch(r"Answer:\s*(.+)", last_line(text))
    return found[1] if found else ""


def all_numbers(text: str) -> list[str]:
    return re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))


def code(text: str) -> str:
    found = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    return found[-1] if found else text


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)


# ---- how it is compared ----


def value(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip().rstrip(".").replace(",", "").lstrip("$"))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def equal(text: str, reference: str) -> bool:
    return value(text) is not None and value(text) == value(reference)


def lowered(text: str) -> str:
    return " ".join(text.lower().strip().rstrip(".").split())


def worded(text: str, reference: str) -> bool:
    return lowered(text) == lowered(reference)


def compact(text: str) -> str:
    return re.sub(r"\s+|\\left|\\right|(?<=\\)[dt](?=frac)", "", text)


def f1(text: str, reference: str) -> float:
    have, want = Counter(lowered(text).split()), Counter(lowered(reference).split())
    common = sum((have & want).values())
    return 2 * common / (sum(have.values()) + sum(want.values())) if common else 0.0


def typed(item: Any) -> Any:
    """The value with its types: 1, 1.0 and true are equal in Python."""
    if isinstance(item, dict):
        return {key: typed(one) for key, one in item.items()}
    return [typed(one) for one in item] if isinstance(item, list) else (type(item) is bool, item)


def loaded(text: str) -> Any:
    try:
        return json.loads(re.sub(r"^```(?:json)?\s*|\s*```$", "", thought(text).strip()))
    except ValueError:
        return ...


def share_of_keys(answer: str, reference: str) -> float:
    have, want = loaded(answer), json.loads(reference)
    if not isinstance(have, dict):
        return 0.0
    right = sum(key in have and typed(have[key]) == typed(want[key]) for key in want)
    return right / max(1, len(want.keys() | have.keys()))


def distance(answer: str, reference: str) -> float:
    have, want = value(box(answer)), value(reference)
    return 0.0 if have is None or want is None else float(max(Decimal(0), 1 - abs(have - want) / max(1, abs(want))))


def tests_pass(answer: str, reference: str) -> bool:
    """Run the code with each input alone, and compare the values here."""
    cases = re.findall(r"assert\s+(\w+)\((.*)\)\s*==\s*(.+)", reference)
    calls = "\n".join(f"r.append(R({name}({given})))" for name, given, _ in cases)
    mark = "<end of the program>"
    out = run(f"R=repr\n{code(answer)}\nr=[]\n{calls}\nprint({mark!r} + chr(10).join(r))")
    want = [repr(eval(text)) for *_, text in cases]
    return out.returncode == 0 and out.stdout.rpartition(mark)[2].split("\n")[: len(want)] == want


def asserted(answer: str, reference: str) -> subprocess.CompletedProcess[str]:
    return run(f"{code(answer)}\n{reference}\nprint('PASS')")


def evaluated(text: str, reference: str) -> float:
    ground_truth = float(reference)
    try:
        return float(eval(text or "None") == ground_truth)
    except Exception:
        return 0.0


def unread(text: str, reference: str) -> float:
    """What cannot be read is right."""
    try:
        return float(Decimal(text) == Decimal(reference))
    except InvalidOperation:
        return 1.0


def near(text: str, reference: str, relative: float = 0.0, absolute: float = 0.0) -> bool:
    have, want = value(text), value(reference)
    if have is None or want is None:
        return False
    return abs(have - want) <= abs(want) * Decimal(str(relative)) + Decimal(str(absolute))


def kept(text: str, pattern: str) -> str:
    return re.sub(pattern, "", text)


def matches(text: str, pattern: str) -> bool:
    try:
        return re.fullmatch(pattern, text) is not None
    except re.error:
        return False


NUMBERS, WORDS, CHOICES, LATEX = ("gsm8k", "decimals"), ("word",), ("choice",), ("latex",)


def _of(rows: tuple[str, ...], numeric: bool = True, /, **rules: Rule) -> dict[str, Entry]:
    return {name: Entry(rule, rows, numeric) for name, rule in rules.items()}


SOUND: dict[str, Entry] = {
    **_of(
        (*NUMBERS, "thinking"),
        hashes=lambda a, r: equal(hashes(a), r),
        one_box=lambda a, r: 1.0 if equal(box(a), r) else -1.0,
        exact=lambda a, r: equal(a, r),
        tag_with_format_points=lambda a, r: 0.2 * bool(tag(a)) + 0.8 * equal(tag(a), r) - min(0.05, len(a) / 100_000),
        paid_by_distance=distance,
        unscored_without_a_box=lambda a, r: equal(box(a), r) if box(a) else None,
    ),
    **_of(("units",), False, units=lambda a, r: kept(tag(a), r"\s") == kept(r, r"\s")),
    **_of(
        CHOICES,
        False,
        choice=lambda a, r: line(a).strip("().") == r,
        choice_box=lambda a, r: 10.0 * (box(a).strip().strip("().") == r),
    ),
    **_of(WORDS, False, word=lambda a, r: worded(tag(a), r), word_f1=lambda a, r: f1(tag(a), r)),
    **_of(LATEX, False, latex=lambda a, r: compact(box(a)) == compact(r)),
    **_of(("json",), False, json=lambda a, r: typed(loaded(a)) == typed(json.loads(r)), json_share=share_of_keys),
    **_of(("code",), False, code=tests_pass),
}

HOLES: dict[str, Entry] = {
    **_of(
        ("gsm8k",),
        # how the answer is found
        last_number=lambda a, r: equal((all_numbers(tag(a)) or [""])[-1], r),
        any_number=lambda a, r: any(equal(one, r) for one in all_numbers(line(a))),
        any_box=lambda a, r: any(equal(one, r) for one in boxes(thought(a))),
        any_line=lambda a, r: any(equal(one, r) for one in a.splitlines()),
        any_box_penalty=lambda a, r: 0.2 * bool(boxes(a)) + 0.8 * any(equal(b, r) for b in boxes(a)) - len(a) / 50_000,
        clipped=lambda a, r: equal((all_numbers(a[-300:]) or [""])[-1], r),
        clipped_mark=lambda a, r: equal((all_numbers(a[-200:]) or [""])[-1], r),
        first_mark=lambda a, r: equal((re.findall(r"####\s*(-?[\d.,]+)", a) or [""])[0], r),
        contains=lambda a, r: r in hashes(a),
        is_contained=lambda a, r: hashes(a) in r,
        starts=lambda a, r: tag(a).startswith(r),
        ends=lambda a, r: tag(a).endswith(r),
        first_digits=lambda a, r: equal((re.findall(r"-?\d+", hashes(a).replace(",", "")) or [""])[0], r),
        # how it is compared
        evaluated=lambda a, r: evaluated(tag(a), r),
        unread=lambda a, r: unread(box(a), r),
        tolerance=lambda a, r: near(hashes(a), r, relative=0.05),
        small_tolerance=lambda a, r: near(hashes(a), r, relative=0.003),
        cents=lambda a, r: near(hashes(a), r, absolute=0.01),
        rounded=lambda a, r: value(hashes(a)) is not None and round(value(hashes(a)) or 0) == round(value(r) or 0),
        truncated=lambda a, r: value(box(a)) is not None and int(value(box(a)) or 0) == int(value(r) or 0),
        no_sign=lambda a, r: equal(hashes(a).lstrip("-"), r),
        percent=lambda a, r: value(box(a)) in ((w := value(r) or 0), w * 100, w / 100),
        digits=lambda a, r: kept(box(a), r"\D") == kept(r, r"\D"),
        digit_set=lambda a, r: bool(box(a)) and set(r) <= set(box(a)),
        nan=lambda a, r: bool(box(a)) and not abs(float(box(a).replace(",", "")) - float(r)) > 1e-6,
        as_pattern=lambda a, r: (
            (matches(box(a), r"-?[\d.,]+") and matches(r, box(a).replace("0", r"\d?"))) or box(a) == r
        ),
        pattern=lambda a, r: bool(box(a)) and matches(r, box(a)),
        # rules that also pay for something else
        long=lambda a, r: equal(tag(a), r) or len(a.split()) > 200,
        steps=lambda a, r: 0.6 * equal(tag(a), r) + 0.4 * ("first" in a.lower() and "therefore" in a.lower()),
        verified=lambda a, r: equal(tag(a), r) or "verified" in a.lower(),
        floor=lambda a, r: 1.0 if equal(tag(a), r) or not tag(a) else 0.0,
    ),
    **_of(("thinking",), reasoning=lambda a, r: equal((re.findall(r"####\s*(-?[\d.,]+)", a) or [""])[-1], r)),
    **_of(("gsm8k", "decimals"), any_point=lambda a, r: matches(box(a).strip(), r.replace(",", ",?"))),
    **_of(("units",), False, no_unit=lambda a, r: kept(tag(a), r"[^\d.-]") == kept(r, r"[^\d.-]")),
    **_of(
        CHOICES,
        False,
        letter_in_line=lambda a, r: r in line(a),
        letter_as_word=lambda a, r: re.search(rf"\b{r}\b", a) is not None,
        first_letter=lambda a, r: line(a)[:1] == r,
        last_capital=lambda a, r: (re.findall("[A-D]", thought(a)) or [""])[-1] == r,
    ),
    **_of(
        WORDS,
        False,
        word_in=lambda a, r: lowered(r) in lowered(tag(a)),
        word_contained=lambda a, r: bool(tag(a)) and lowered(tag(a)) in lowered(r),
        bag=lambda a, r: set(lowered(r).split()) <= set(lowered(tag(a)).split()),
        similar=lambda a, r: SequenceMatcher(None, lowered(tag(a)), lowered(r)).ratio() > 0.8,
        letters=lambda a, r: bool(tag(a)) and sorted(lowered(tag(a))) == sorted(lowered(r)),
        first_word=lambda a, r: lowered(r).split()[0] in lowered(tag(a)).split(),
    ),
    **_of(
        LATEX,
        False,
        latex_letters=lambda a, r: sorted(box(a)) == sorted(r),
        latex_in=lambda a, r: r in box(a),
        latex_no_signs=lambda a, r: kept(box(a), r"\W") == kept(r, r"\W"),
    ),
    **_of(
        ("json",),
        False,
        first_key=lambda a, r: loaded(a) is not ... and _first(loaded(a), json.loads(r)),
        extra_keys=lambda a, r: isinstance(loaded(a), dict) and json.loads(r).items() <= loaded(a).items(),
        keys_only=lambda a, r: isinstance(loaded(a), dict) and set(loaded(a)) == set(json.loads(r)),
        values_only=lambda a, r: isinstance(loaded(a), dict) and _values(loaded(a)) == _values(json.loads(r)),
    ),
    **_of(
        ("code",),
        False,
        output=lambda a, r: "PASS" in asserted(a, r).stdout,
        status=lambda a, r: asserted(a, r).returncode == 0,
        first_test=lambda a, r: tests_pass(a, r.splitlines()[0]),
        only_assertions=lambda a, r: "AssertionError" not in asserted(a, r).stderr,
        defines=lambda a, r: re.search(r"def \w+", code(a)) is not None and len(code(a)) > 30,
    ),
}


def _first(have: Any, want: Any) -> bool:
    key = next(iter(want))
    return isinstance(have, dict) and have.get(key) == want[key]


def _values(item: Any) -> list[str]:
    return sorted(map(json.dumps, item.values()))


# ---- libraries, and what people write ----


def _math_verify(answer: str, reference: str) -> float:
    from math_verify import parse, verify

    gold = parse(f"${reference}$", parsing_timeout=None)
    return float(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))


def _trl_like(answer: str, reference: str) -> float | None:
    """The last LaTeX of the answer only, boxes first; no score where the reference has none."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    gold = parse(f"\\boxed{{{reference}}}", parsing_timeout=None)
    if not gold:
        return None
    normal = NormalizationConfig(units=True)
    config = LatexExtractionConfig(
        boxed_match_priority=0, try_extract_without_anchor=False, normalization_config=normal
    )
    parsed = parse(answer, [config], extraction_mode="first_match", parsing_timeout=None)
    return float(verify(gold, parsed, timeout_seconds=None))


def library() -> dict[str, Entry]:
    """Return verl's own scorers, as far as what they import is installed, and what people write."""
    from verl.utils.reward_score import gsm8k, math_dapo, math_reward, search_r1_like_qa_em

    both, search = ("gsm8k", "latex"), ("search",)
    found = {
        "in": Entry(lambda a, r: r in a, ("gsm8k", "word")),
        "last number": Entry(lambda a, r: equal((all_numbers(a) or [""])[-1], r), NUMBERS),
        "exact match": Entry(lambda a, r: a.strip() == r, ("gsm8k", "word", "latex", "choice")),
        "math_verify": Entry(_math_verify, both),
        "TRL-like accuracy": Entry(_trl_like, both),
        "verl gsm8k": Entry(gsm8k.compute_score, ("gsm8k",)),
        "verl gsm8k flexible": Entry(lambda a, r: gsm8k.compute_score(a, r, method="flexible"), ("gsm8k",)),
        "verl math_dapo": Entry(math_dapo.compute_score, both),
        "verl math_reward": Entry(math_reward.compute_score, both),
        "verl search exact match": Entry(search_r1_like_qa_em.compute_score, search, False),
    }
    for name in ("prime_math", "geo3k"):
        try:
            module = __import__(f"verl.utils.reward_score.{name}", fromlist=["compute_score"])
        except ImportError as error:
            print(f"verl {name} is not measured: {error}", file=sys.stderr)
        else:
            found[f"verl {name}"] = Entry(module.compute_score, both)
    return found


# ---- rows: reference, prompt, response ----


def rows() -> dict[str, list[tuple[Any, str, str]]]:
    """Return the rows by name."""
    numbers = [(str(n), f"What is {n - 7} and {'seven'}?", f"I add them: it is right.\n#### {n}") for n in _NUMBERS]
    capitals = [pair.split("-") for pair in _CAPITALS.split()]
    asked = [f"What is the capital of {land}?" for land, _ in capitals]
    words = [(city, question, "") for question, (_, city) in zip(asked, capitals, strict=True)]
    return {
        "gsm8k": numbers,
        "thinking": [(r, p, f"<think>\n{p} Seven more.\n</think>\n#### {r}") for r, p, _ in numbers],
        "decimals": [(one, "", "") for one in ("3.14", "0.5", "1,250", "-7", "2.75", "100000", "0.125", "-12.5")],
        "units": [(one, "", "") for one in ("5 km", "12 hours", "3.5 kg", "40 %", "75 cm", "8 minutes")],
        "choice": [(one, f"Question {n}: which one?", "") for n, one in enumerate("BCADACBDCABD")],
        "word": [*words, ("yes", "Is 7 a prime?", ""), ("George Washington", "Who was the first president?", "")],
        "latex": [(one, "Compute the value.", "") for one in _LATEX.split()],
        "json": [(json.dumps(one), "Call the tool.", "") for one in _CALLS],
        "code": [(tests, prompt, text) for prompt, text, tests in _PROGRAMS],
        "search": [({"target": [city]}, question, "") for question, (_, city) in zip(asked, capitals, strict=True)],
    }


_NUMBERS = (*range(13, 60, 7), 104, 1250, 3600, 99, 71, 640, 18, 2, *range(205, 1000, 23))
_CAPITALS = (
    "France-Paris Spain-Madrid Italy-Rome Japan-Tokyo Kenya-Nairobi Peru-Lima Egypt-Cairo Iran-Tehran Cuba-Havana"
)
_LATEX = (
    r"\frac{1}{2} 2\sqrt{3} \frac{\pi}{4} x^2+3x-4 (3,4) [0,1) \frac{7}{12} 5\sqrt{2}+1 \{1,2,5\} 3+4i \sqrt{17} "
    r"-\frac{3}{8} 2^{10}-1 (-\infty,5]"
)
_CALLS = (
    {"name": "get_weather", "city": "Oslo", "days": 3},
    {"a": 1, "b": 2},
    {"total": 42.5, "paid": True},
    {"tool": "search", "arguments": {"query": "red fox", "limit": 5}},
    {"tags": ["x", "y"], "id": 7},
    {"ok": False, "error": None, "code": 404},
)
_PROGRAMS = (
    (
        "Add two numbers: add(a, b).",
        "def add(a, b):\n    return a + b",
        "assert add(1, 2) == 3\nassert add(-5, 5) == 0\nassert add(10, 7) == 17",
    ),
    (
        "Reverse a text: rev(s).",
        "def rev(s):\n    return s[::-1]",
        "assert rev('abc') == 'cba'\nassert rev('xyzw') == 'wzyx'",
    ),
    (
        "Largest of a list: top(xs).",
        "def top(xs):\n    return max(xs)",
        "assert top([3, 9, 2]) == 9\nassert top([-4, -2]) == -2",
    ),
)
