from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from reward_loop.client import Choice, Json, NoVerdictError, Number, Order, Pattern, Ratings, Verdict
from reward_loop.errors import ConfigError


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("Score: 7", 7),
        ("**Score:** 7/10.", 7),
        ("The rest is fine.\nscore : **8**", 8),
        ("Score: \\boxed{7}", 7),
        ("Score: 7.5.", 7.5),
        ("Score: [7] as it should be", 7),
        ('{"reason": "x", "score": 4}', 4),
        ("<think>Score: 1?</think> Score: 9", 9),
        ("Score: 1e1", 10),
    ],
)
def test_a_number(reply: str, number: float) -> None:
    assert Number(0, 10).read(reply) == (number, number)


@pytest.mark.parametrize(("reply", "score"), [("Score: 1", 0.0), ("Score: 5.5", 0.5), ("Score: 10/10", 1.0)])
def test_a_scaled_number_has_a_score_from_0_to_1(reply: str, score: float) -> None:
    verdict, scaled = Number(1, 10, scaled=True).read(reply)
    assert (verdict, scaled) == (1 + 9 * score, score)
    with pytest.raises(NoVerdictError):
        Number(1, 10, scaled=True).read("Score: 0")


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "a good answer",
        "7",
        "Score: eleven",
        "Score: 11",
        "Score: -1",
        "Score: 7/5",
        "Score: 7-8",
        "Score: 7 - 8",
        "Score: 70%",
        "Score: 1,000",
        "Score: 7x",
        "Score: __import__('os').getpid()",
        # The last one counts, even if it cannot be read.
        "Score: 7. No: Score: unclear",
        "Score: 7. Score: 11",
        "Score: nan",
    ],
)
def test_no_number(reply: str) -> None:
    with pytest.raises(NoVerdictError):
        Number(0, 10).read(reply)


def test_a_number_alone_in_the_last_line() -> None:
    number = Number(-1, 1, after=None)
    assert number.read("I think:\n**-0.5**\n\n") == (-0.5, -0.5)
    for reply in ("", "0.5 maybe", "0.5\nwell"):
        with pytest.raises(NoVerdictError):
            number.read(reply)


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        ("Verdict: correct", ("correct", 1.0)),
        ("**Verdict**: Incorrect.", ("incorrect", 0.0)),
        ('verdict: "partly  correct"', ("partly correct", 0.5)),
        ("Verdict: \u0130ncorrect", ("incorrect", 0.0)),  # the Turkish capital of i
        ("Verdict: correct? No.\nVerdict: incorrect", ("incorrect", 0.0)),
    ],
)
def test_a_choice(reply: str, choice: tuple[str, float]) -> None:
    assert Choice({"correct": 1, "incorrect": 0, "partly correct": 0.5}).read(reply) == choice


@pytest.mark.parametrize(
    "reply", ["", "correct", "Verdict: correctly", "Verdict: correct-ish", "Verdict: correct. Verdict: hm", "Verdict:"]
)
def test_no_choice(reply: str) -> None:
    with pytest.raises(NoVerdictError):
        Choice({"correct": 1, "incorrect": 0}).read(reply)


def test_a_choice_in_brackets_and_one_alone() -> None:
    assert Choice({"A": 1, "B": 0, "C": 0.5}, after="[[").read("[[A]] is short, so [[B]]") == ("B", 0)
    alone = Choice({"yes": 1, "no": 0}, after=None)
    assert alone.read("Hm.\n**Yes.**") == ("yes", 1)
    with pytest.raises(NoVerdictError, match="the last line is not a single"):
        alone.read("yes and no")


class Model(BaseModel):
    reason: str
    score: float = Field(ge=0, le=1)


class Typed(TypedDict):
    reason: str
    score: float


@dataclass
class Data:
    reason: str
    score: float


@pytest.mark.parametrize("schema", [Model, Typed, Data])
def test_json(schema: type) -> None:
    reply = 'At first {"reason": "x", "score": 1}, but:\n```json\n{"reason": "a } b", "score": 0.5}\n```'
    assert Json(schema).read(reply) == ({"reason": "a } b", "score": 0.5}, 0.5)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "{",
        '{"reason": "x"}',
        '{"reason": "x", "score": 2}',
        '{"reason": "x", "score": NaN}',
        '{"reason": "x", "score": 0.5} {"score": 0.5}',
        '{"a": ' * 5000,
        "{'reason': 'x', 'score': 0.5}",
    ],
)
def test_no_json(reply: str) -> None:
    with pytest.raises(NoVerdictError):
        Json(Model).read(reply)


def test_the_score_may_have_another_name_and_must_be_a_number() -> None:
    class Graded(BaseModel):
        grade: int | Literal["none"]

    assert Json(Graded, score="grade").read('{"grade": 3}') == ({"grade": 3}, 3.0)
    for grade in ('"none"', "1" + "0" * 400):
        with pytest.raises(NoVerdictError, match="not a number"):
            Json(Graded, score="grade").read(f'{{"grade": {grade}}}')


def test_a_schema_can_be_enforced_by_the_server() -> None:
    form = Json(Model, enforce=True).request["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["schema"]["required"] == ["reason", "score"]
    assert Json(Model).request == {}


def test_invalid_verdict_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="the first bound must be below"):
        Number(1, 1)
    for scores in ({}, {"Yes": 1, "yes": 0}, {"": 1}):
        with pytest.raises(ConfigError, match="Choice"):
            Choice(scores)


@given(st.text(alphabet="Score:Verdict 0123456789./%-*[]{}\"'\\abx\n,eE+", max_size=80))
def test_any_reply_has_a_verdict_in_range_or_none(reply: str) -> None:
    verdicts: list[Verdict] = [Number(0, 10), Number(0, 10, after=None), Choice({"a": 1, "b": 0}), Json(Model)]
    for verdict in verdicts:
        try:
            _, score = verdict.read(reply)
        except NoVerdictError:
            continue
        assert 0 <= score <= 10


@pytest.mark.parametrize(
    ("pattern", "reply", "read"),
    [
        (Pattern(r"<g>(.*?)</g>", {"good": 1, "bad": 0}), "<g>bad</g> no: <g> Good </g>", (" Good ", 1.0)),
        (Pattern(r"\d+(?=%)"), "5% or 70%", ("70", 70.0)),
        (Pattern(r"grade (-?[\d.]+)"), "grade -0.5", ("-0.5", -0.5)),
    ],
)
def test_a_pattern_reads_its_last_match(pattern: Pattern, reply: str, read: tuple[str, float]) -> None:
    assert pattern.read(reply) == read


@pytest.mark.parametrize("reply", ["", "<g></g>", "<g>good</g> <g>fine</g>", "<g>__import__('os')</g>"])
def test_a_pattern_without_a_known_verdict(reply: str) -> None:
    for pattern in (Pattern(r"<g>(.*?)</g>", {"good": 1, "bad": 0}), Pattern(r"<g>(.*?)</g>")):
        with pytest.raises(NoVerdictError):
            pattern.read(reply)


def test_a_number_that_is_not_finite_is_no_verdict() -> None:
    with pytest.raises(NoVerdictError, match="finite"):
        Pattern(r"\w+$").read("nan")


def test_an_invalid_pattern_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        Pattern("(")


def test_ratings_are_scaled_and_weighted() -> None:
    ratings = Ratings({"correct": 2, "clear": 1, "rude": -1}, 0, 4)
    reply = 'It is rude: {"correct": 0} is too low. {"reason": "x", "correct": 4, "clear": 2, "rude": 1}'
    assert ratings.read(reply) == ({"correct": 1.0, "clear": 0.5, "rude": 0.25}, (2 + 0.5 - 0.25) / 3)


@pytest.mark.parametrize(
    "reply", ["", '{"correct": 4}', '{"correct": 4, "clear": 11}', '{"correct": 4, "clear": NaN}', '[{"correct": 1}]']
)
def test_ratings_of_all_criteria_are_required(reply: str) -> None:
    with pytest.raises(NoVerdictError):
        Ratings({"correct": 1, "clear": 1}).read(reply)


@pytest.mark.parametrize("names", [("Style", "style"), ("style", " style "), ("c", "\u0441")])
def test_names_that_a_reply_cannot_tell_apart_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="differ only in case, spaces or look-alikes"):
        Ratings(dict.fromkeys(names, 1.0))
    if names[0] != "c":  # a pattern ignores case and spaces alone
        with pytest.raises(ConfigError, match="differ only in case or spaces"):
            Pattern(r"<g>(.*)</g>", {names[0]: 1.0, names[1]: 0.0})


def test_ratings_may_restrict_the_reply_of_the_server() -> None:
    schema = Ratings({"it is right": 1}, enforce=True).request["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["it is right"]
    assert schema["properties"]["it is right"]["maximum"] == 10


@pytest.mark.parametrize("weights", [{}, {"a": 0}, {"a": -1}, {"a": 1, "b": float("nan")}, {"a": float("inf")}])
def test_weights_are_finite_and_one_is_positive(weights: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="weights"):
        Ratings(weights)
    with pytest.raises(ConfigError, match="below"):
        Ratings({"a": 1}, 1, 1)


@pytest.mark.parametrize(
    ("reply", "order"),
    [
        ("Ranking: 3 > 1 > 2", [2, 0, 1]),
        ("Ranking: 1 > 2 > 3\nNo.\n**Ranking:** 2, 1, 3\nThese are my 3.", [1, 0, 2]),
        ("Ranking:\n[3] = [2] > [1]", [2, 1, 0]),
    ],
)
def test_an_order(reply: str, order: list[int]) -> None:
    assert Order(3).read(reply) == (order, None)


@pytest.mark.parametrize(
    "reply", ["", "3 > 1 > 2", "Ranking: 3 > 1", "Ranking: 1 2 2 3", "Ranking: 0 1 2", "Ranking: "]
)
def test_an_order_has_each_number_once(reply: str) -> None:
    with pytest.raises(NoVerdictError):
        Order(3).read(reply + " " + "9" * 5000)
    with pytest.raises(NoVerdictError):
        Order(3).read(reply)
