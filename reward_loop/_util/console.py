"""The consoles of commands."""

from __future__ import annotations

from typing import IO

from rich.console import Console

__all__ = ["console"]


def console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """Return a console that only interprets markup: no emoji codes, no colours for numbers, no wrapping."""
    return Console(file=file, stderr=stderr, soft_wrap=True, emoji=False, highlight=False)
