"""Expected scores: the mean over the verdicts that a judge might have written, weighted with their probabilities."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from reward_loop.client.chat import Reply
from reward_loop.client.verdict_grammar import folded
from reward_loop.client.verdicts import Choice, Number

__all__ = ["LOGPROBS", "expected_score"]

LOGPROBS: Mapping[str, Any] = {"logprobs": True, "top_logprobs": 20}
"""The fields of a request for log-probabilities. vLLM (by default) and OpenAI give at most 20 alternatives."""

_AROUND = " \t\n\"'`*_:.,()[]$"
"""What may be in one token with a word."""

_LEAST_COVERED = 0.95
"""The smallest sum of the probabilities of all words. The rest could be anything, such as a longer number."""


def expected_score(verdict: Number | Choice, text: str, reply: Reply) -> float | None:
    """Return the expected score at the position of the last verdict, as in G-Eval (arXiv 2303.16634).

    The first token of the verdict decides: the alternatives that begin exactly one word of the verdict count, with
    their probabilities, normalised to a sum of 1. The token that was written must begin only the word that was written,
    and the alternatives that count must have nearly all of the probability.

    Args:
        verdict: the format of the verdict.
        text: the text from which the verdict is read: the `folded` text of the reply, or as long as that.
        reply: the reply, with log-probabilities if the server gives them.

    Returns:
        The expected score; ``None`` without one, so that the written verdict counts.

    Raises:
        NoVerdictError: the text contains no valid verdict.
    """
    found = verdict.locate(text)
    written = " ".join(found.text[found.start : found.end].split()).lower()
    word = next((word for word in verdict.words if " ".join(folded(word).split()).lower() == written), None)
    token = _token_at(reply, found.start)
    alternatives = None if token is None else _alternatives(token)
    if word is None or token is None or alternatives is None or _begun(verdict, token["token"]) != [word]:
        return None
    weights: dict[str, float] = {}
    for text_of, logprob in alternatives.items():
        # Several tokens may begin one word: with a space or a capital letter.
        words = _begun(verdict, text_of)
        if len(words) == 1:
            weights[words[0]] = weights.get(words[0], 0.0) + math.exp(logprob)
    total = sum(weights.values())
    # The sum of rounded probabilities may be a little above 1.
    if not _LEAST_COVERED <= total <= 1.01:
        return None
    return sum(verdict.words[word] * weight for word, weight in weights.items()) / total


def _begun(verdict: Number | Choice, token: str) -> list[str]:
    """Return the words that begin with the text of a token."""
    start = folded(token).strip(_AROUND).lower()
    return [word for word in verdict.words if start and folded(word).lower().startswith(start)]


def _alternatives(token: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the log-probability of each alternative; ``None`` if the server sends them in another form."""
    top = token.get("top_logprobs")
    if not isinstance(top, Sequence) or isinstance(top, str):
        return None
    found: dict[str, float] = {}
    for one in (token, *top):  # the token that was written is not always among the most probable ones
        text, logprob = (one.get("token"), one.get("logprob")) if isinstance(one, Mapping) else (None, None)
        # Rounding may give a certain token more than 0.
        if not isinstance(text, str) or not isinstance(logprob, int | float) or not logprob <= 0.001:
            return None
        found[text] = logprob
    return found


def _token_at(reply: Reply, position: int) -> Mapping[str, Any] | None:
    """Return the token with the character at a position of the reply's folded text; ``None`` if there is none."""
    tokens, text = reply.logprobs or (), folded(reply.text)
    texts = [folded(str(token.get("token"))) for token in tokens]
    # Found from the end: the tokens may also contain reasoning before the text, and parts of characters.
    for context in (8, 0):
        start = max(0, position - context)
        found = "".join(texts).rfind(text[start:])
        if found >= 0:
            ends = list(accumulate(map(len, texts)))
            return tokens[bisect_right(ends, found + position - start)]
    return None
