"""Turn what a reward function returned into a score and extra info, or say why it is no score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

from reward_loop._text import listing, shorten
from reward_loop.errors import InvalidScoreError
from reward_loop.types import RESERVED_KEYS

__all__ = ["normalise"]

_ACCEPTED = "a number, a bool, a dict with `score`, a tuple (score, prompt, explanation), or None (unscored)"


def normalise(returned: Any) -> tuple[float | None, dict[str, Any]]:
    """Return ``(score, extra_info)``; a score of ``None`` means *unscored*.

    A number alone is also recorded as ``acc``, a dict keeps all its keys, ``score`` included, as in verl; a tuple
    ``(score, prompt, explanation)`` is recorded as ``prompt`` and ``explanation``.

    Raises:
        InvalidScoreError: it is no score.
    """
    if returned is None:
        return None, {}
    if type(returned) is float and math.isfinite(returned):  # most are: what follows asks abstract classes
        return returned, {"acc": returned}
    if isinstance(returned, Mapping):
        return _from_mapping(returned)
    if isinstance(returned, tuple):
        if len(returned) != 3:
            raise InvalidScoreError(
                f"returned a tuple of {len(returned)}, {shorten(returned)}, not (score, prompt, explanation)"
            )
        score, prompt, explanation = returned
        return _score(_scalar(score), returned), {"prompt": prompt, "explanation": explanation}
    value = _scalar(returned)
    return _score(value, returned), {"acc": value}


def _from_mapping(returned: Mapping[str, Any]) -> tuple[float | None, dict[str, Any]]:
    if "score" not in returned:
        raise InvalidScoreError(
            f"returned a dict without `score`: {shorten(returned)}; its keys are {listing(map(str, returned))}"
        )
    if clash := RESERVED_KEYS & returned.keys():
        raise InvalidScoreError(f"returned {listing(clash)}, which the reward loop itself fills in: rename it")
    value = _scalar(returned["score"])
    return _score(value, returned), {**returned, "score": value}


def _scalar(value: Any) -> Any:
    """Unpack a 0-d array, tensor or numpy scalar, of whichever library, into a Python number."""
    if (
        type(value) not in (float, int, bool)
        and getattr(value, "shape", None) == ()
        and callable(getattr(value, "item", None))
    ):
        return value.item()
    return value


def _score(value: Any, returned: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real | Decimal):
        shape = getattr(value, "shape", None)
        hint = f" of shape {tuple(shape)}; reduce it to one number" if shape else f"; return {_ACCEPTED}"
        raise InvalidScoreError(f"returned {shorten(returned)}, whose score is a {type(value).__name__}{hint}")
    try:
        score = float(value)
    except (OverflowError, ValueError):
        score = math.inf
    if not math.isfinite(score):
        raise InvalidScoreError(
            f"returned {shorten(returned)}, whose score is not finite; return None for a sample that cannot be scored"
        )
    return score
