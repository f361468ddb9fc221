"""Convert the return value of a reward function to a score and extra info."""

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
"""The largest finite float32. Trainers store rewards in float32, where a larger score would become infinite."""

_ACCEPTED = "a number, a bool, a dict with `score`, a tuple (score, prompt, explanation), or None (unscored)"


def normalise(returned: Any) -> tuple[float | None, dict[str, Any]]:
    """Return ``(score, extra_info)`` of a reward function's return value; a score of ``None`` means *unscored*.

    The extra info depends on the type, as in verl:

    - A number or bool: ``{"acc": number}``.
    - A dict: all its keys, including ``score``.
    - A tuple ``(score, prompt, explanation)``: the keys ``prompt`` and ``explanation``.
    - ``None``: empty.

    Raises:
        InvalidScoreError: the value has another type, a reserved key, or a score that is not a finite number.
    """
    if returned is None:
        return None, {}
    if type(returned) is float and -_MAX <= returned <= _MAX:  # fast path: skips the slow isinstance checks below
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
    except Exception as error:  # for instance a tensor on a failed device
        raise InvalidScoreError(
            f"returned a {type(returned).__name__} that cannot be read: {shorten(error)}"
        ) from error


def is_finite(number: Any) -> bool:
    """Whether a number is finite in float32."""
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
    """Convert a 0-d array, tensor or numpy scalar to a Python number; return other values unchanged."""
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
