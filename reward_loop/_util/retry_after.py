"""The pause before the next attempt: `Backoff`; how long an answer asks to wait, and whether waiting helps at all."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import time

REFUSAL_STATUS = frozenset({429, 529})
"""Too many requests (429), and Anthropic's status for an overloaded service (529)."""

_RESET = re.compile(r"(?:x-)?rate-?limit-reset(?:-.+)?|anthropic-(?:priority-|fast-)?ratelimit-.+-reset")
"""The headers with the time at which a limit is full again."""

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|us|µs|ns|d|h|m|s)")

_EPOCH_S = 1e9
"""Larger numbers in a reset header are not seconds from now, but since 1970."""
_EPOCH_MS = 1e11
"""Still larger ones are milliseconds since 1970."""

_NO_CREDIT = re.compile(
    r"insufficient[ _-]?(quota|credit|balance|funds)|balance is insufficient|credit balance is too low"
    r"|billing[ _-]?(hard[ _-]?limit[ _-]?reached|not[ _-]?active|error)|exceeded_current_quota_error|account_?overdue"
    r"|arrearage|used all available credits|reached (its|your|the) (monthly )?spending limit",
    re.IGNORECASE,
)
_NO_CREDIT_STATUS = frozenset({401, 403, 412, 429})

_NO_CREDIT_400 = re.compile(r"credit balance is too low|arrearage|insufficient_quota|billing_", re.IGNORECASE)
"""Anthropic and Alibaba answer 400. Fewer words count there, since such an answer may repeat parts of the request."""


_INCURABLE = re.compile(
    r"request too large|(?<!remaining )\blimit:? 0\b(?!\.\d)|per[ _-]?day|\b(?:rpd|tpd)\b|daily (?:limit|quota)",
    re.IGNORECASE,
)
"""A request above the limit, a limit of 0, a limit per day: no pause within a run changes that."""

_NAMED_PAUSE = re.compile(
    r'(?:"(?:retry_?delay|x-ratelimit-reset(?:-[a-z]+)?)\\?": ?\\?"?|(?:try again|retry) (?:in|after) )'
    r"((?:\d+(?:\.\d+)? ?(?:(?:ms|milli|[dhms])[a-z]*)? ?)+)",
    re.IGNORECASE,
)
"""Where a body has the pause: Google's ``retryDelay``, the words of OpenAI, the headers that OpenRouter passes on.
An answer within an answer is a text, whose quotation marks have a backslash."""

_UNIT_WORD = re.compile(r" ?(ms|milli|[dhms])[a-z]* ?")


def is_incurable(status: int | None, text: str) -> bool:
    """Return whether a service refused a request for a reason that waiting does not change."""
    return status in REFUSAL_STATUS and bool(_INCURABLE.search(text))


def is_out_of_credit(status: int | None, text: str) -> bool:
    """Return whether an answer says that the account of the service has no credit left; no retry changes that.

    Args:
        status: the HTTP status; 402 (payment required) needs no text.
        text: the body of the answer, or the message of an exception.
    """
    if status == 400:
        return bool(_NO_CREDIT_400.search(text))
    return status == 402 or (status in _NO_CREDIT_STATUS and bool(_NO_CREDIT.search(text)))


def asked_pause(headers: Mapping[str, str], status: int | None = None, text: str = "") -> float | None:
    """Return the seconds that an answer asks to wait; ``None`` if it does not, or no value is valid.

    The first of these headers counts: ``Retry-After-Ms``, ``X-Ms-Retry-After-Ms``, ``Retry-After``, and for a refusal
    the resets of rate limits: of the limits without anything left (``remaining``), the last one. Other answers of a
    service have these, too. Last, the text of a refusal may name the pause.
    """
    given = {str(name).lower(): str(value) for name, value in headers.items()}
    # Milliseconds first: they are more precise than the whole seconds of a `Retry-After` beside them.
    for name in ("retry-after-ms", "x-ms-retry-after-ms"):  # the second one is Azure's
        if (milliseconds := retry_after_seconds(given.get(name))) is not None:
            return milliseconds / 1000
    if (seconds := retry_after_seconds(given.get("retry-after"))) is not None:
        return seconds
    if status not in REFUSAL_STATUS:
        return None
    resets = {name: reset for name in given if _RESET.fullmatch(name) and (reset := _reset(given[name])) is not None}
    used_up = [
        reset for name, reset in resets.items() if _remaining(given.get(name.replace("reset", "remaining"))) <= 0
    ]
    if resets:
        return max(used_up, default=min(resets.values()))
    named = _NAMED_PAUSE.search(text)
    return None if named is None else _reset(_UNIT_WORD.sub(_unit, named[1].lower()))


def retry_after_seconds(value: str | None) -> float | None:
    """Return the seconds from now that a ``Retry-After`` header asks to wait (RFC 9110, 10.2.3).

    The header is a number or a date: of any form of RFC 9110, with another offset, or ISO 8601; without a zone, in UTC.
    A time in the past is 0, a header that is missing or not valid ``None``.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        date = _date(value.strip())
        seconds = math.nan if date is None else date.timestamp() - time()
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _reset(value: str) -> float | None:
    """Return the seconds until a reset: a duration such as ``6m0s``, seconds from now or since 1970, or a date."""
    value = value.strip()
    duration = value.lower().replace(" ", "")
    if _PART.sub("", duration) == "" and duration:
        return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(duration))
    seconds = retry_after_seconds(value)
    if seconds is None or seconds <= _EPOCH_S or not value.replace(".", "", 1).isdigit():
        return seconds
    return max(0.0, (seconds / 1000 if seconds > _EPOCH_MS else seconds) - time())


def _unit(word: re.Match[str]) -> str:
    return "ms" if word[1] == "milli" else word[1]


def _remaining(value: str | None) -> float:
    try:
        # Without this header, the limit may be the one that is used up.
        return float(value or 0)
    except ValueError:
        return 0.0


def _date(text: str) -> datetime | None:
    for parse in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            date = parse(text)
            return date if date.tzinfo else date.replace(tzinfo=UTC)
        except (ValueError, OverflowError, TypeError):
            continue
    return None


FIRST_S, LONGEST_S = 0.5, 5.0
"""The first and the longest pause in seconds, where no option sets them."""


class Backoff:
    """Pauses that double, each random between a half and the whole, so that many callers do not come back together."""

    __slots__ = ("_longest_s", "_pause_s")

    def __init__(self, first_s: float | None = None, longest_s: float | None = None) -> None:
        self._longest_s = LONGEST_S if longest_s is None else longest_s
        self._pause_s = min(FIRST_S if first_s is None else first_s, self._longest_s)

    def next_s(self) -> float:
        """Return the seconds of the next pause."""
        pause = self._pause_s * random.uniform(0.5, 1)
        self._pause_s = min(2 * self._pause_s, self._longest_s)
        return pause
