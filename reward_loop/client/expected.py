"""Expected scores: the mean over the verdicts that a judge might have written, weighted with their probabilities."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from reward_loop.client.chat import Reply
from reward_loop.client.verdicts import Choice, Number

__all__ = ["LOGPROBS", "expected_score"]

LOGPROBS: Mapping[str, Any] = {"logprobs": True, "top_logprobs": 20}
"""The fields of a request for log-probabilities. vLLM (by default) and OpenAI give at most 20 alternatives."""

_AROUND = " \t\n\"'`*_:.,()[]"
"""What may be in one token with a word."""


def expected_score(verdict: Number | Choice, text: str, reply: Reply) -> float | None:
    """Return the expected score at the position of the last verdict, as in G-Eval (arXiv 2303.16634).

    The first token of the verdict decides: its alternatives that begin exactly one word of the verdict count, with
    their probabilities, normalised to a sum of 1.

    Args:
        verdict: the format of the verdict.
        text: the text from which the verdict is read, as long as that of the reply.
        reply: the reply, with log-probabilities if the server gives them.

    Returns:
        The expected score; ``None`` if the server gave no log-probabilities for the position of the verdict.

    Raises:
        NoVerdictError: the text contains no valid verdict.
    """
    token = _token_at(reply, verdict.locate(text)[0])
    if token is None:
        return None
    weights: dict[str, float] = {}
    # The token that was written is not always among the most probable ones.
    for alternative in {str(one["token"]): one for one in (token, *(token.get("top_logprobs") or ()))}.values():
        start = str(alternative["token"]).strip(_AROUND).lower()
        words = [word for word in verdict.words if start and word.lower().startswith(start)]
        if len(words) == 1:
            weights[words[0]] = weights.get(words[0], 0.0) + math.exp(alternative["logprob"])
    total = sum(weights.values())
    return sum(verdict.words[word] * weight for word, weight in weights.items()) / total if total else None


def _token_at(reply: Reply, position: int) -> Mapping[str, Any] | None:
    """Return the token with the character at a position of the reply's text; ``None`` if there is none."""
    texts = [str(token["token"]) for token in reply.logprobs or ()]
    # Found from the end: the tokens may also contain reasoning before the text, and parts of characters.
    for context in (8, 0):
        start = max(0, position - context)
        found = "".join(texts).rfind(reply.text[start:])
        if found >= 0:
            ends = list(accumulate(map(len, texts)))
            return (reply.logprobs or ())[bisect_right(ends, found + position - start)]
    return None
