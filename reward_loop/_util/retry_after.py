"""Parses the HTTP header ``Retry-After``."""

from __future__ import annotations

import math
from email.utils import parsedate_to_datetime
from time import time

__all__ = ["retry_after_seconds"]


def retry_after_seconds(value: str | None) -> float | None:
    """Returns the seconds to wait that a ``Retry-After`` header asks for (RFC 9110, 10.2.3).

    Args:
        value: the header, a number of seconds or a date; ``None`` if the response has no such header.

    Returns:
        seconds from now, 0 for a time in the past; ``None`` if the header is missing or not valid.
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
