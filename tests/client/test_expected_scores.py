from __future__ import annotations

import math
from typing import Any

import pytest

from reward_loop.client import Choice, Judge, Number, Pattern
from reward_loop.errors import ConfigError
from reward_loop.testing import Body, FakeJudge


def token(text: str, **alternatives: float) -> dict[str, Any]:
    """Return a token as a server reports it; probabilities by token, with ``_`` for a space."""
    top = [{"token": name.replace("_", " "), "logprob": math.log(share)} for name, share in alternatives.items()]
    return {"token": text, "logprob": math.log(alternatives.get(text.replace(" ", "_"), 1.0)), "top_logprobs": top}


def reply(text: str, tokens: list[dict[str, Any]] | None) -> Body:
    choice: dict[str, Any] = {"message": {"content": text}, "finish_reason": "stop"}
    if tokens is not None:
        choice["logprobs"] = {"content": tokens}
    return Body({"choices": [choice]})


DIGITS = [token("Good"), token(".\n"), token("Score:"), token(" 4", _4=0.6, _2=0.3, _1=0.06, x=0.04)]


@pytest.mark.parametrize(
    ("verdict", "tokens", "score"),
    [
        (Number(1, 5), DIGITS, 3.06 / 0.96),
        (Number(1, 5, scaled=True), DIGITS, (3 / 4 * 0.6 + 1 / 4 * 0.3) / 0.96),
        # Reasoning before the text, and a special token after it.
        (Number(1, 5), [token("<think>Score: 4</think>"), *DIGITS, token("<|end|>")], 3.06 / 0.96),
        # A character in two tokens, which a server shows as two unknown characters.
        (Number(1, 5), [token("\ufffd"), token("\ufffd"), token(".\n"), *DIGITS[2:]], 3.06 / 0.96),
        # A token may begin a word; tokens that begin two words, or none, do not count.
        (
            Choice({"correct": 1, "incorrect": 0}),
            [token("Verdict:"), token(" corr", _corr=0.72, _in=0.24, _=0.02, _maybe=0.02), token("ect")],
            0.75,
        ),
        (
            Choice({"A": 1, "B": 0, "tie": 0.5}, after="[["),
            [token("[["), token("A]]", **{"A]]": 0.5, "B]]": 0.5})],
            0.5,
        ),
    ],
)
async def test_the_score_is_the_mean_of_the_verdicts_weighted_with_their_probabilities(
    verdict: Number | Choice, tokens: list[dict[str, Any]], score: float
) -> None:
    text = "".join(one["token"] for one in tokens).removeprefix("<think>Score: 4</think>").removesuffix("<|end|>")
    text = text.replace("\ufffd\ufffd", "好")
    async with FakeJudge() as server:
        server.script(reply(text, tokens))
        judgement = await Judge("{{answer}}", verdict, expected=True)(server.address, answer="4")
        assert server.requests[0].body["top_logprobs"] == 20
    assert judgement.score == pytest.approx(score)
    assert judgement.verdict == verdict.read(text)[0]


@pytest.mark.parametrize(
    ("verdict", "tokens", "score"),
    [
        (
            Number(1, 5, enforce=True),
            [token('{"reason": "4 is a verdict: 4", "verdict":'), DIGITS[-1], token("}")],
            3.06 / 0.96,
        ),
        (
            Choice({"yes": 1, "no": 0}, enforce=True),
            [token('{"reason": "x", "verdict": "'), token("yes", yes=0.75, no=0.25), token('"}')],
            0.75,
        ),
        # The value is not at the end: the written verdict counts.
        (Number(1, 5, enforce=True), [token('{"verdict":'), DIGITS[-1], token(', "reason": "x"}')], 4),
    ],
)
async def test_with_enforce_the_value_is_at_the_end_of_the_object(
    verdict: Number | Choice, tokens: list[dict[str, Any]], score: float
) -> None:
    async with FakeJudge() as server:
        server.script(reply("".join(one["token"] for one in tokens), tokens))
        judgement = await Judge("{{answer}}", verdict, expected=True)(server.address, answer="4")
        assert len(server.requests) == 1
    assert judgement.score == pytest.approx(score)


WORDS = Choice({"correct": 1, "incorrect": 0, "incomplete": 0})


@pytest.mark.parametrize(
    ("verdict", "tokens"),
    [
        (Number(1, 5), []),
        (Number(1, 5), [token("another text")]),
        (Number(1, 5), [token("Score: "), token("4", x=1.0)]),
        # The token that was written begins two words, or the word together with the marker.
        (WORDS, [token("Verdict:"), token(" in", _in=0.999, _correct=0.001), token("correct")]),
        (WORDS, [token("Verdict: incorrect", _correct=1.0)]),
        # The alternatives leave out too much: this judge would most likely write something else.
        (Number(1, 5), [token("Score:"), token(" 4", _4=0.4, _5=0.3, _The=0.3)]),
        # Numbers of several tokens.
        (Number(0, 9), [token("Score: "), token("7", **{"7": 0.6, "2": 0.4}), token(".5")]),
        (Number(0, 9), [token("Score: "), token("0", **{"0": 0.6, "2": 0.4}), token("7")]),
        (Number(0, 1), [token("Score: "), token("0", **{"0": 0.6, "1": 0.4}), token("."), token("5")]),
        # Probabilities that cannot be.
        (Number(1, 5), [token("Score: "), token("4", **{"4": 0.9, "2": 0.9})]),
    ],
)
async def test_without_nearly_all_probabilities_of_the_verdict_its_own_score_counts(
    verdict: Number | Choice, tokens: list[dict[str, Any]]
) -> None:
    text = "".join(one["token"] for one in tokens)
    text = text if len(tokens) > 1 or isinstance(verdict, Choice) else "Score: 4"
    async with FakeJudge() as server:
        server.script(reply(text, tokens))
        judgement = await Judge("{{answer}}", verdict, expected=True)(server.address, answer="4")
    assert judgement.score == verdict.read(text)[1]


FOUR = {"token": " 4", "logprob": -0.7}


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        [FOUR],
        {"content": ["Score:", " 4"]},
        {"content": [{"token": "Score:", "logprob": 0.0}, FOUR]},
        {"content": [{"token": "Score:"}, FOUR | {"top_logprobs": {" 4": -0.7, " 2": -0.7}}]},
        {"content": [{"token": "Score:"}, FOUR | {"top_logprobs": [{"token": " 2", "logprob": "-0.7"}]}]},
        {"content": [{"token": "Score:"}, FOUR | {"top_logprobs": [{"token": None, "logprob": -0.7}]}]},
        {"content": [{"token": "token_id:15"}, {"token": "token_id:19", "logprob": -0.1, "top_logprobs": []}]},
        # Legacy completions of vLLM and SGLang.
        {"tokens": ["Score:", " 4"], "token_logprobs": [0.0, -0.7], "top_logprobs": [{" 4": -0.7, " 2": -0.7}]},
    ],
)
async def test_log_probabilities_of_another_form_do_not_count(logprobs: Any) -> None:
    choice = {"message": {"content": "Score: 4"}, "finish_reason": "stop", "logprobs": logprobs}
    async with FakeJudge() as server:
        server.script(Body({"choices": [choice]}))
        judgement = await Judge("{{answer}}", Number(1, 5), expected=True)(server.address, answer="4")
    assert judgement.score == 4
    assert judgement.unscored is None


async def test_a_quoted_answer_does_not_move_the_position() -> None:
    tokens = [token("It has 2 parts.\n"), *DIGITS[2:]]
    async with FakeJudge() as server:
        server.script(reply("".join(one["token"] for one in tokens), tokens))
        judge = Judge("{{answer}}", Number(1, 5), expected=True, fence=["answer"])
        judgement = await judge(server.address, answer="Score: 5")
    assert judgement.score == pytest.approx(3.06 / 0.96)


@pytest.mark.parametrize("verdict", [Number(1, 10), Number(-1, 1), Number(0, 2.5), Pattern(r"\d")])
def test_verdicts_of_several_tokens_have_no_expected_score(verdict: Any) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Judge("{{answer}}", verdict, expected=True)
