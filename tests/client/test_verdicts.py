"""The contract of verdicts, on replies with the label that everybody gives them: `replies.jsonl`, one reply a line.

`verdict` is what the judge decided; null if the reply is doubtful, which must have no verdict. A clear reply has it or
none: the judge is then asked again.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from reward_loop.client import Choice, Json, NoVerdictError, Number, Pattern, Ratings, Verdict
from reward_loop.client.verdicts import final_text, plain
from reward_loop.errors import ConfigError


class Grade(BaseModel):
    score: float


FORMATS: dict[str, Verdict] = {
    "number": Number(1, 10),
    "tag": Number(1, 10, after="<verdict>"),
    "rating_brackets": Number(1, 10, after="Rating: [["),
    "boxed": Number(1, 10, after="\\boxed{"),
    "chinese": Number(1, 10, after="\u8bc4\u5206:"),
    "alone": Number(1, 10, after=None),
    "signed": Number(-10, 10),
    "hundred": Number(0, 100),
    "choice": Choice({"correct": 1, "incorrect": 0}),
    "three": Choice({"correct": 1, "partially correct": 0.5, "incorrect": 0}),
    "letter": Choice({"C": 1, "P": 0.5, "I": 0}, after="GRADE:"),
    "same": Choice({"same": 1, "different": 0}),
    "yes": Choice({"yes": 1, "no": 0}),
    "brackets": Choice({"A": 1, "B": 0, "tie": 0.5}, after="[["),
    "preferred": Choice({"A": 1, "B": 0, "tie": 0.5}, after="Winner:"),
    "json": Json(Grade),
    "ratings": Ratings({"correct": 2, "clear": 1}),
    "pattern": Pattern(r"<verdict>(\w+)</verdict>", {"yes": 1, "no": 0}),
    "digits": Pattern(r"\[\[(\d+)\]\]"),
}
NUMBER, TAG, CHOICE, ALONE, JSON = (FORMATS[name] for name in ("number", "tag", "choice", "alone", "json"))
REPLIES = [json.loads(line) for line in (Path(__file__).parent / "replies.jsonl").read_text().splitlines()]


def read(verdict: Verdict, reply: str, again: bool = False) -> Any:
    """Return the verdict; ``None`` if there is none."""
    try:
        return verdict.read(reply, again)[0]
    except NoVerdictError:
        return None


@pytest.mark.parametrize("name", FORMATS)
def test_no_doubtful_reply_has_a_verdict_and_a_clear_one_has_its_own_or_none(name: str) -> None:
    for row in (row for row in REPLIES if row["format"] == name):
        assert read(FORMATS[name], row["reply"]) in (None, row["verdict"]), row


def test_the_shares_that_docs_judges_states() -> None:
    found = Counter((row["verdict"] is None, read(FORMATS[row["format"]], row["reply"]) is None) for row in REPLIES)
    # Doubtful and without a verdict; doubtful and read; clear and read; clear and asked again.
    assert [found[True, True], found[True, False], found[False, False], found[False, True]] == [651, 0, 75, 392]


@pytest.mark.parametrize(
    ("verdict", "reply", "expected"),
    [
        (NUMBER, "Score: 7", (7, 7)),
        (NUMBER, "It is good.\n\n**Score:** 7/10.", (7, 7)),
        (NUMBER, "It is good.\n### score : **8.5**", (8.5, 8.5)),
        (NUMBER, "Strengths:\n- clear\n\nScore: 8", (8, 8)),
        (NUMBER, "<think>Score: 1?</think> Score: 9", (9, 9)),
        (Number(1, 10, scaled=True), "Score: 5.5", (5.5, 0.5)),
        (ALONE, "I think:\n2 of 3 are right.\n**8**\n", (8, 8)),
        (TAG, "Good.\n<VERDICT> 8 </verdict>", (8, 8)),
        (CHOICE, "It differs.\n**Verdict**: Incorrect.", ("incorrect", 0)),
        (Choice({"partly correct": 0.5}), "Verdict: partly  correct", ("partly correct", 0.5)),
        (FORMATS["brackets"], "[[A]]", ("A", 1)),
        (FORMATS["boxed"], "$\\boxed{7}$", (7, 7)),
        (FORMATS["pattern"], "It holds.\n**<verdict>yes</verdict>**", ("yes", 1)),
        (JSON, '```json\n{"score": 8, "reason": "a } and {"}\n```', ({"score": 8}, 8)),
        (
            Ratings({"correct": 2, "clear": 1, "rude": -1}, 0, 4),
            '{"reason": "x", "correct": 4, "clear": 2, "rude": 1}',
            ({"correct": 1.0, "clear": 0.5, "rude": 0.25}, (2 + 0.5 - 0.25) / 3),
        ),
    ],
)
def test_a_reply_that_keeps_the_contract(verdict: Verdict, reply: str, expected: Any) -> None:
    assert verdict.read(reply) == expected


@pytest.mark.parametrize(
    ("verdict", "bare", "expected"),
    [
        (NUMBER, "8", 8),
        (NUMBER, "**Score: 8**", 8),
        (TAG, "8", 8),
        (TAG, "<verdict>8</verdict>", 8),
        (CHOICE, "correct.", "correct"),
        (FORMATS["brackets"], "A", "A"),
        (FORMATS["pattern"], "yes", "yes"),
        (FORMATS["pattern"], "<verdict>yes</verdict>", "yes"),
        (JSON, '{"score": 8}', {"score": 8}),
    ],
)
def test_asked_again_the_reply_is_the_line_or_the_bare_value_and_nothing_else(
    verdict: Verdict, bare: str, expected: Any
) -> None:
    assert read(verdict, bare, again=True) == expected
    for more in (f"It is {bare}", f"{bare}\n{bare}", f"{bare} or so", f"<think>{bare}", "", "It is good."):
        assert read(verdict, more, again=True) is None


@pytest.mark.parametrize(
    ("verdict", "reply"),
    [
        # The sentence before goes on, or asks for an example.
        (NUMBER, "A perfect answer gets, e.g.\nScore: 10"),
        (NUMBER, "A perfect answer gets...\nScore: 10"),
        (NUMBER, "A perfect answer gets \u2026\nScore: 10"),
        (NUMBER, "What would a perfect answer get?\nScore: 10"),
        (NUMBER, "There are two cases.\n1.\nScore: 10"),
        # A code block without an end.
        (NUMBER, "The form is this.\n```\nScore: 7"),
        (FORMATS["digits"], "The form is this.\n```\n[[7]]"),
        # A second value in other characters.
        (ALONE, "9\u200b.\n7"),
        (ALONE, "\uff19.\n7"),
        # Reasoning without an end.
        (NUMBER, "analysisthe answer may be right.\nScore: 9"),
        (NUMBER, "[think]It may be right.\nScore: 9"),
        (NUMBER, "<\uff5cthink\uff5c>It may be right.\nScore: 9"),
        (NUMBER, "\uff1cthink\uff1eIt may be right.\nScore: 9"),
        (NUMBER, "<think:fast>It may be right.\nScore: 9"),
        # More digits than Python reads in an integer.
        (NUMBER, "&#" + "1" * 5000 + "; is good.\nScore: 7"),
    ],
)
def test_a_doubtful_reply_has_no_verdict(verdict: Verdict, reply: str) -> None:
    assert read(verdict, reply) is None


def test_a_bare_number_is_none_of_a_pattern_which_may_exclude_it() -> None:
    verdict = Pattern(r"Score: ([1-5])")
    assert [read(verdict, reply, again=True) for reply in ("Score: 4", "4", "10", "1e3", "Score: 10")] == [
        *("4", None, None, None, None)
    ]


THOUGHTS = [
    ("<think>", "</think>"),
    ("<THINK>\n", "\n</THINK>"),
    ("<thinking budget='9'>", "</thinking >"),
    ("<reasoning>", "</reasoning>"),
    ("<scratchpad>", "</scratchpad>"),
    ("<seed:think>", "</seed:think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("[THINK]", "[/THINK]"),
    ("&lt;think&gt;", "&lt;/think&gt;"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ("<|channel>thought\n", "<channel|>"),
    ("analysisWe see: ", "assistantfinal"),
]


@pytest.mark.parametrize(("begin", "end"), THOUGHTS)
@pytest.mark.parametrize(
    ("verdict", "forged", "true"),
    [
        (NUMBER, "Score: 9", "Score: 3"),
        (ALONE, "\n9", "\n3"),
        (TAG, "<verdict>9</verdict>", "<verdict>3</verdict>"),
        (JSON, '{"score": 9}', '{"score": 3}'),
        (FORMATS["pattern"], "<verdict>yes</verdict>", "<verdict>no</verdict>"),
    ],
)
def test_only_the_text_after_the_last_end_of_reasoning_counts(
    begin: str, end: str, verdict: Verdict, forged: str, true: str
) -> None:
    decided = read(verdict, true)
    assert decided is not None
    assert read(verdict, f"{begin}It may be right.\n{forged}") is None  # its end is missing
    assert read(verdict, f"{begin}{forged}, but no.{end}\nI cannot rate this.") is None
    assert read(verdict, f"{begin}{forged}{end}{true}") == decided
    assert read(verdict, f"{begin}a{end}{begin}{forged}{end}\n{true}") in (None, decided)
    assert read(verdict, f"{true}\n{begin}{forged}") is None
    if "analysis" not in begin:
        assert read(verdict, f"{forged}{end}\n{true}") == decided  # the template has its beginning
        assert read(verdict, f"{begin}a {begin}b{end} {forged}") is None or "channel" in begin  # an inner end


class Model(BaseModel):
    reason: str
    score: float = Field(ge=0, le=1)


def test_json_is_validated_by_a_schema() -> None:
    verdict = Json(Model)
    assert verdict.read('{"reason": "a } b", "score": 0.5}') == ({"reason": "a } b", "score": 0.5}, 0.5)
    for reply in (
        "{",
        '{"reason": "x"}',
        '{"reason": "x", "score": NaN}',
        '{"a": ' * 5000,
        '{"reason": "x", "score": 1',
    ):
        assert read(verdict, reply) is None
    assert read(verdict, '{"reason": "x", "score": 2}') is None


def test_the_score_may_have_another_name_and_must_be_a_number() -> None:
    class Graded(BaseModel):
        grade: int | str

    assert Json(Graded, score="grade").read('{"grade": 3}') == ({"grade": 3}, 3.0)
    for grade in ('"none"', '"3"', "1" + "0" * 400):
        with pytest.raises(NoVerdictError, match="not a number"):
            Json(Graded, score="grade").read(f'{{"grade": {grade}}}')


@pytest.mark.parametrize(
    ("verdict", "written", "read"),
    [
        (Number(1, 10, enforce=True), 8, (8, 8)),
        (Choice({"yes": 1, "no": 0}, enforce=True), "no", ("no", 0)),
        (Pattern(r"<g>(\w+)</g>", {"good": 1, "bad": 0}, enforce=True), "bad", ("bad", 0)),
    ],
)
def test_enforce_asks_for_a_reason_and_then_the_verdict_and_reads_the_line_if_a_server_ignores_it(
    verdict: Verdict, written: Any, read: Any
) -> None:
    schema = verdict.request["response_format"]["json_schema"]["schema"]
    assert [*schema["properties"]] == schema["required"] == ["reason", "verdict"]
    reply = json.dumps({"reason": "Score: 1", "verdict": written})
    assert verdict.read(reply) == verdict.read(reply, True) == read
    line = f"<g>{written}</g>" if isinstance(verdict, Pattern) else None
    assert verdict.read(line or f"{'Score' if written == 8 else 'Verdict'}: {written}") == read
    for wrong in ({"verdict": None}, {"verdict": True}, {"verdict": [written]}, {"reason": "x"}, {"verdict": "?"}):
        with pytest.raises(NoVerdictError):
            verdict.read(json.dumps(wrong))


def test_enforced_json_has_the_fields_of_the_schema_and_ratings_a_reason_first() -> None:
    form = Json(Model, enforce=True).request["response_format"]
    assert (form["type"], form["json_schema"]["schema"]["required"]) == ("json_schema", ["reason", "score"])
    schema = Ratings({"it is right": 1}, enforce=True).request["response_format"]["json_schema"]["schema"]
    assert [*schema["properties"]] == ["reason", "it is right"]
    assert schema["properties"]["it is right"]["maximum"] == 10
    assert all(one.request == {} for one in FORMATS.values())


def test_invalid_formats_are_refused() -> None:
    for make, problem in (
        (lambda: Number(1, 1), "the first bound must be below"),
        (lambda: Choice({}), "Choice"),
        (lambda: Choice({"Yes": 1, "yes": 0}), "Choice"),
        (lambda: Choice({"": 1}), "Choice"),
        (lambda: Pattern("("), "not a valid regular expression"),
        (lambda: Pattern("([1-5])", enforce=True), "a number that the expression excludes"),
        (lambda: Pattern("(.)", {"Style": 1, " style": 0}), "differ only in case or spaces"),
        (lambda: Ratings({"Style": 1, "style": 1}), "differ only in case or spaces"),
        (lambda: Ratings({}), "weights"),
        (lambda: Ratings({"a": -1}), "weights"),
        (lambda: Ratings({"a": 1, "b": float("nan")}), "weights"),
        (lambda: Ratings({"a": 1}, 1, 1), "below"),
    ):
        with pytest.raises(ConfigError, match=problem):
            make()


@given(st.text(alphabet="Score:Verdict 0123456789./%-*[]{}<>\"'\\abx\n,eE+\u200b\uff1a", max_size=80))
def test_any_reply_has_a_verdict_in_range_or_none_and_a_draft_never_stands_for_it(reply: str) -> None:
    for verdict in (Number(0, 10), Number(0, 10, after=None), Choice({"a": 1, "b": 0}), Json(Model)):
        try:
            _, score = verdict.read(reply)
        except NoVerdictError:
            continue
        assert score is not None
        assert 0 <= score <= 10
    assert read(NUMBER, f"Score: 3.\n{reply}\nScore: 8") in (None, 8)
    assert read(TAG, f"Bad.\n<verdict>3</verdict>\n{reply}\n<verdict>8</verdict>") is None


UNITS = [
    '{"k":', "{", "[", "}", '{"a":"', '"', '\\"', "```\n", "<", "<think>", "</think>", "<think></think>", "<|channel|>",
    "Score:", "Score: 1 ", "Score", "S*", "*", "*_", " ", "[[A]] ", "\n", "8\n", "8", "a\u200b", "\ud800", "- a\n", "#",
    "<verdict>yes</verdict>", "<verdict>", "</verdict>", "score is ", "&amp;", ". ", "1/", "a.\n",
]  # fmt: skip


NOISE_S = 0.01
"""Below, noise is larger than what is measured."""


@pytest.mark.parametrize("unit", UNITS)
def test_the_time_for_a_long_reply_is_linear_in_its_length(unit: str) -> None:
    body = unit * (50_000 // len(unit.encode("utf-8", "surrogatepass")))
    for head, tail in (('{"a": "', "\nScore: 8 [[A]]"), ("It is good.\n<verdict>8</verdict>", "")):
        for verdict in (NUMBER, TAG, ALONE, JSON, FORMATS["pattern"]):
            seconds = _seconds(verdict, head + body + tail)
            if seconds > NOISE_S:
                # Linear code takes 4 times as long for 4 times the text, quadratic code 16 times. Both are measured
                # in this process, so the speed of the machine cancels out.
                quarter = _seconds(verdict, head + body[: len(body) // 4] + tail, at_least_s=0)
                assert seconds < 8 * quarter + NOISE_S, (verdict, head, tail, seconds, quarter)


@pytest.mark.parametrize(
    ("head", "unit", "tail"),
    [("```\n", "\n", "x"), ("a", "\u0301\u0316", ".\nScore: 8"), ("It is.", " ", "\nScore: 8"), ("", "<", "\n8")],
)
def test_no_long_reply_takes_minutes(head: str, unit: str, tail: str) -> None:
    # Quadratic code takes minutes for each.
    reply = head + unit * (200_000 // len(unit)) + tail
    for verdict in (NUMBER, TAG, ALONE, JSON, Number(1, 10, enforce=True), FORMATS["pattern"]):
        started = time.thread_time()
        read(verdict, reply)
        assert time.thread_time() - started < 20, verdict


def _seconds(verdict: Verdict, reply: str, at_least_s: float = NOISE_S) -> float:
    """Seconds of this thread: the best of three, since the first may fill caches, or the first below `at_least_s`."""
    times: list[float] = []
    while len(times) < 3 and min(times, default=math.inf) >= at_least_s:
        started = time.thread_time()
        read(verdict, reply)
        times.append(time.thread_time() - started)
    return min(times)


@given(st.text(max_size=60))
def test_the_plain_text_of_any_reply_is_stable(text: str) -> None:
    assert plain(plain(text).replace("&", "")) == plain(text).replace("&", "")
    for reply in (text, f"<think>{text}"):
        try:
            final_text(reply)
        except NoVerdictError:
            continue
