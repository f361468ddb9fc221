"""Turn what a reward function returned into a score and extra info, or say why it is no score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

from reward_loop._util.text import listing, shorten
from reward_loop.errors import InvalidScoreError
from reward_loop.types import RESERVED_KEYS

__all__ = ["is_finite", "normalise"]

_MAX = (2 - 2**-23) * 2.0**127
"""The greatest number in float32, in which trainers keep rewards: beyond it they would be infinite."""

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
    if type(returned) is float and -_MAX <= returned <= _MAX:  # most are: what follows asks abstract classes
        return returned, {"acc": returned}
    try:
        if isinstance(returned, Mapping):
            return _from_mapping(returned)
        if isinstance(returned, tuple):
            return _from_tuple(returned)
        value = _scalar(returned)
        return _score(value, returned), {"acc": value}
    except InvalidScoreError:
        raise
    except Exception as error:  # of a tensor on a device that is lost, say
        raise InvalidScoreError(
            f"returned a {type(returned).__name__} that cannot be read: {shorten(error)}"
        ) from error


def is_finite(number: Any) -> bool:
    """Whether a number is finite as trainers keep it, in float32."""
    return bool(-_MAX <= number <= _MAX)


def _from_tuple(returned: tuple[Any, ...]) -> tuple[float | None, dict[str, Any]]:
    if len(returned) != 3:
        raise InvalidScoreError(
            f"returned a tuple of {len(returned)}, {shorten(returned)}, not (score, prompt, explanation)"
        )
    score, prompt, explanation = returned
    return _score(_scalar(score), returned), {"prompt": prompt, "explanation": explanation}


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
    except (OverflowError, ValueError):  # 10**400; Decimal("sNaN")
        score = math.inf
    if not is_finite(score):
        where = " in float32" if math.isfinite(score) else ""
        raise InvalidScoreError(
            f"returned {shorten(returned)}, whose score is not finite{where}; return None for a sample that cannot be "
            "scored"
        )
    return score
