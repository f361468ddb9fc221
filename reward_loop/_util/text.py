"""Formats parts of error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["cut", "did_you_mean", "duration", "listing", "rounded", "shorten"]


def cut(text: str, limit: int) -> str:
    """Returns the text, cut to ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` if a known name is similar, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def duration(seconds: float) -> str:
    """Returns ``1.5 s``, or ``1.5 ms`` for less than a second."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def listing(names: Iterable[str]) -> str:
    """Returns the names, sorted and separated by commas, or ``none``."""
    return ", ".join(sorted(names)) or "none"


def rounded(value: float) -> str:
    """Returns a number for people: four significant digits, or all digits before the point: ``0.4286``, ``12,345``."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def shorten(value: object, limit: int = 120) -> str:
    """Returns ``repr(value)``, cut to ``limit`` characters; an object whose ``repr`` raises is named by its type."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__qualname__}, whose repr() raises>"
    return cut(text, limit)
