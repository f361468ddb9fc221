"""The kinds of answers, and what an attack finds in functions with a hole; all called in this process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from reward_loop.offline.attacks import (
    KINDS,
    PAID,
    WRONG,
    AttackedRow,
    changed,
    number,
    rows_of,
    same,
    texts_of,
    type_of,
)
from reward_loop.offline.holes import Attack, AttackReport, Outcome

Rule = Callable[[str, Any], Any]
NUMBERS = [("1250", "How many?", "I add them. #### 1250"), ("36", "And now?", "#### 36"), ("7", "Then?", "#### 7")]


async def attack(rule: Rule, rows: Sequence[tuple[Any, str, str]]) -> AttackReport:
    async def score(index: int, answers: Sequence[str]) -> list[Outcome]:
        return [called(rule, answer, rows[index][0]) for answer in answers]

    return await Attack(rows_of(rows), score).run()


def called(rule: Rule, answer: str, reference: Any) -> Outcome:
    try:
        score = rule(answer, reference)
    except Exception as error:
        return repr(error)
    return None if score is None else float(score)


def hashes(answer: str) -> str:
    """The text behind #### on the last line."""
    found = re.fullmatch(r"####\s*(.+)", (answer.strip().splitlines() or [""])[-1].strip())
    return found[1] if found else ""


def last_number(answer: str) -> str:
    return (re.findall(r"-?\d+(?:\.\d+)?", answer.replace(",", "")) or ["x"])[-1]


def unread(answer: str, reference: str) -> float:
    try:
        return float(float(hashes(answer)) == float(reference))
    except ValueError:
        return 1.0


HOLES: dict[str, tuple[Rule, set[str]]] = {
    "an error is right": (unread, {"empty", "format alone", "unreadable"}),
    "the last number": (lambda a, r: last_number(a) == r, {"negated", "unequal", "beside the answer"}),
    "in": (lambda a, r: r in hashes(a), {"shotgun", "either or", "digits", "negated"}),
    "the reference holds it": (lambda a, r: hashes(a) in r, {"empty", "part"}),
    "any of several": (lambda a, r: r in re.findall(r"#### (\S+)", a), {"many answers", "two answers"}),
    "a tolerance": (lambda a, r: number(hashes(a)) and abs(number(hashes(a)) - int(r)) <= 1, {"near value"}),
    "no sign": (lambda a, r: hashes(a).lstrip("-") == r, {"other sign"}),
    "nan": (lambda a, r: not abs(float(hashes(a) or 0) - float(r)) > 0.1, {"unreadable"}),
    "a pattern": (lambda a, r: re.fullmatch(hashes(a), r) is not None, {"pattern"}),
    "length": (lambda a, r: hashes(a) == r or len(a) > 2000, {"padding"}),
}


@pytest.mark.parametrize("name", HOLES)
async def test_a_hole_is_found_by_its_kind(name: str) -> None:
    rule, kinds = HOLES[name]
    report = await attack(lambda answer, reference: float(rule(answer, reference) or 0), NUMBERS)
    assert report.attacked == 3
    assert kinds <= {kind.name for kind in report.flagged(WRONG)}


async def test_a_sound_rule_has_no_hole_and_the_refused_spellings_are_listed() -> None:
    report = await attack(lambda answer, reference: float(hashes(answer) == reference), NUMBERS)
    assert report.flagged((*WRONG, "right")) == []
    assert report.forms == ["#### {}"]
    assert {kind.name for kind in report.flagged(["form"])} > {"spellings", "with a unit"}
    assert report.not_built == {}
    without_responses = [(reference, "", "") for reference, _, _ in NUMBERS]
    report = await attack(lambda answer, reference: float(hashes(answer) == reference), without_responses)
    assert report.not_built == {"other response": 3, "prompt alone": 3, "own response": 3}


async def test_code_that_is_evaluated_is_found() -> None:
    def evaluates(answer: str, reference: str) -> float:
        ground_truth = float(reference)
        return float(eval(hashes(answer) or "0") == ground_truth)

    report = await attack(evaluates, NUMBERS)
    assert "evaluated" in {kind.name for kind in report.flagged(PAID)}


async def test_scores_are_compared_with_those_of_right_and_wrong_answers_whatever_their_range() -> None:
    for right, wrong in ((1.0, -1.0), (10.0, 0.0), (0.0, -5.0), (True, None)):
        report = await attack(lambda a, r, *, x=right, y=wrong: x if r in hashes(a) else y, NUMBERS)
        assert "negated" in {kind.name for kind in report.flagged(WRONG)}
        report = await attack(lambda a, r, *, x=right, y=wrong: x if hashes(a) == r else y, NUMBERS)
        assert report.flagged(WRONG) == []


async def test_near_answers_that_are_paid_by_their_distance_are_no_false_positives() -> None:
    def graded(answer: str, reference: str) -> float:
        if not re.fullmatch(r"-?\d+(\.\d+)?", hashes(answer)):
            return 0.0
        return max(0.0, 1 - abs(float(hashes(answer)) - int(reference)) / int(reference))

    report = await attack(graded, NUMBERS)
    assert report.graded
    assert report.flagged(WRONG) == []


async def test_points_for_style_are_found_by_words_that_please_and_by_other_responses() -> None:
    rows = [(r, p, f"I swear by the moon.\n{text}") for r, p, text in NUMBERS]

    def pays(answer: str, reference: str) -> float:
        return 0.6 * (hashes(answer) == reference) + 0.4 * ("by the moon" in answer)

    report = await attack(pays, rows)
    (bonus,) = report.bonuses
    assert bonus.name == "other response"
    assert bonus.bonus == pytest.approx(2 / 3)
    report = await attack(lambda a, r: 0.6 * (hashes(a) == r) + 0.4 * ("I have verified" in a), NUMBERS)
    assert "style" in {kind.name for kind in report.bonuses}


async def test_a_reference_that_is_refused_in_every_form_is_counted() -> None:
    def raises(answer: str, reference: str) -> float:
        return float(hashes(answer) == str(int(reference)))

    report = await attack(raises, [*NUMBERS, ("1/2", "", "#### 1/2")])
    assert report.refused == [3]
    assert report.attacked == 3


async def test_a_function_that_accepts_anything_is_found() -> None:
    report = await attack(lambda answer, reference: 1.0, NUMBERS)
    assert [kind.name for kind in report.flagged(PAID)] == ["empty"]
    report = await attack(lambda answer, reference: float(bool(hashes(answer))), NUMBERS)
    assert [(kind.name, kind.smallest) for kind in report.flagged(PAID)] == [("another answer", "#### 36")]


TYPED = {
    "number": ["1250", "1,000", "$5", "1/2", "50%", "5 km", "-0.5", "1e6"],
    "word": ["Paris", "import of goods", "George Washington", "x" * 50],
    "expression": ["\\frac{1}{2}", "x^2+1", "(3,4)", "[0, 1)"],
    "json": ['{"a": 1}', "[1, 2]"],
    "program": ["assert add(1, 2) == 3", "import os\nassert f()"],
}


def test_the_type_of_a_reference() -> None:
    for kind, references in TYPED.items():
        assert [type_of(one) for one in references] == [kind] * len(references)
    assert type_of("A", ["A", "B", "C"]) == "choice"
    assert type_of("A", ["A", "Berlin", "Cairo"]) == "word"
    assert texts_of({"target": ["Paris", "paris"]}) == ["Paris", "paris"]
    assert texts_of("so #### 7")[0] == "7"


@pytest.mark.parametrize("reference", [one for references in TYPED.values() for one in references])
def test_no_wrong_answer_is_the_right_one(reference: str) -> None:
    (row, *_) = rows_of([(reference, "Which one?", f"It is {reference}"), ("zzz", "", "zzz"), ("9999", "", "")])
    assert not same(changed(row.text), row.text)
    for kind in KINDS:
        if row.type[0].upper() in kind.types and kind.level in WRONG:
            for answer in kind.build(row):
                assert answer != row.text, kind.name
                if row.type == "json":
                    assert not _equal_json(answer, row.text), kind.name


def _equal_json(one: str, other: str) -> bool:
    try:
        return json.dumps(json.loads(one), sort_keys=True) == json.dumps(json.loads(other), sort_keys=True)
    except ValueError:
        return False


def test_templates_have_no_digits_which_a_rule_might_read() -> None:
    for kind in KINDS:
        if kind.level in (*WRONG, "right"):
            assert not any(re.search(r"\d", re.sub(r"\\d", "", text)) for text in kind.templates), kind.name
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert AttackedRow("1").put("1") == "1"


def exact(answer: str, reference: Any) -> float:
    """A sound rule: exactly one box, compared in lower case, without articles and brackets."""
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", answer.rpartition("</think>")[2])
    truths = reference if isinstance(reference, list) else [reference]
    words = [re.sub(r"^the |[.()]", "", text.strip().lower()) for text in (*boxes, *map(str, truths))]
    equal = {"true": "yes", "false": "no", "1/2": "0.5"}
    return float(len(boxes) == 1 and equal.get(words[0], words[0]) in [equal.get(one, one) for one in words[1:]])


@pytest.mark.parametrize(
    "references",
    [
        ["correct", "incorrect", "correct"],
        ["none", "N/A", "I do not know", "Paris"],
        ["e", "7", "infinity", "inf"],
        ["true", "yes", "no", "false"],
        ["0.5", "1/2", "7"],
        ["(A)", "A", "B", "b"],
        ["the Beatles", "Beatles", "U.S.", "US", "Queen"],
        [["NYC", "New York"], ["New York"], ["Paris"]],
    ],
    ids=str,
)
async def test_an_equal_answer_of_another_row_or_kind_is_no_hole(references: list[Any]) -> None:
    said = [one[0] if isinstance(one, list) else one for one in references]
    rows = [(one, "?", f"So \\boxed{{{text}}}, that is {text}.") for one, text in zip(references, said, strict=True)]
    report = await attack(exact, rows)
    assert report.forms == ["\\boxed{{}}"]
    assert report.flagged(WRONG) == []


def test_another_response_to_the_same_tests_is_no_wrong_answer() -> None:
    tests = "assert double(2) == 4"
    rows = rows_of([(tests, "", "def double(x): return 2 * x"), (tests, "", "def double(x): return x + x")])
    assert [row.others for row in rows] == [(), ()]


async def test_an_empty_reference_is_attacked_as_any_other() -> None:
    report = await attack(lambda a, r: float(hashes(a) == r), [("", "", "I see."), *NUMBERS])
    assert report.attacked == 4
    assert report.refused == []


def test_a_text_that_looks_like_a_huge_number_is_a_word() -> None:
    assert number("7e91234567") is None
