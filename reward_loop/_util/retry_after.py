"""Parses the HTTP header ``Retry-After``."""

from __future__ import annotations

import math
from email.utils import parsedate_to_datetime
from time import time

__all__ = ["retry_after_seconds"]


def retry_after_seconds(value: str | None) -> float | None:
    """Return the seconds from now that a ``Retry-After`` header asks to wait (RFC 9110, 10.2.3).

    The header is a number or a date. A time in the past is 0, a header that is missing or not valid ``None``.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time()
        except (ValueError, OverflowError):  # no date; a year beyond the range of dates
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
