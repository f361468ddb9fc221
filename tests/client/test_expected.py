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


DIGITS = [token("Good"), token(". Score: 1? "), token("Score:"), token(" 4", _4=0.5, _2=0.25, _1=0.05, x=0.2)]


@pytest.mark.parametrize(
    ("verdict", "tokens", "score"),
    [
        (Number(1, 5), DIGITS, (4 * 0.5 + 2 * 0.25 + 0.05) / 0.8),
        (Number(1, 5, scaled=True), DIGITS, (3 / 4 * 0.5 + 1 / 4 * 0.25) / 0.8),
        # Reasoning before the text, and a special token after it.
        (Number(1, 5), [token("<think>Score: 4</think>"), *DIGITS, token("<|end|>")], 2.55 / 0.8),
        # A character in two tokens, which a server shows as two unknown characters.
        (Number(1, 5), [token("\ufffd"), token("\ufffd"), *DIGITS[2:]], 2.55 / 0.8),
        # A token may begin a word; tokens that begin two words, or none, do not count.
        (
            Choice({"correct": 1, "incorrect": 0}),
            [token("Verdict:"), token(" corr", _corr=0.6, _in=0.2, _=0.1, _maybe=0.1), token("ect")],
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


@pytest.mark.parametrize("tokens", [None, [], [token("another text")], [token("Score: "), token("4", x=1.0)]])
async def test_without_probabilities_of_the_verdict_its_own_score_counts(tokens: list[dict[str, Any]] | None) -> None:
    async with FakeJudge() as server:
        server.script(reply("Score: 4", tokens))
        judgement = await Judge("{{answer}}", Number(1, 5), expected=True)(server.address, answer="4")
    assert judgement.score == 4


@pytest.mark.parametrize("verdict", [Number(1, 10), Number(-1, 1), Number(0, 2.5), Pattern(r"\d")])
def test_verdicts_of_several_tokens_have_no_expected_score(verdict: Any) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Judge("{{answer}}", verdict, expected=True)
