"""What a server says by ``Retry-After``."""

from __future__ import annotations

import math
from email.utils import parsedate_to_datetime
from time import time

__all__ = ["retry_after_seconds"]


def retry_after_seconds(value: str | None) -> float | None:
    """Return the seconds from now that a ``Retry-After`` asks for, a number or a date (RFC 9110, 10.2.3).

    A moment that has passed is 0. ``None`` where there is no header, or none that can be read.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time()
        except ValueError:
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
