"""Options that several commands have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer

__all__ = ["json_or_text", "nested", "pairs"]


def pairs(items: Sequence[str] | None, option: str) -> dict[str, str]:
    """What an option of the form ``NAME=VALUE`` was given, each time.

    Raises:
        typer.BadParameter: one is not of that form.
    """
    found = {}
    for item in items or ():
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise typer.BadParameter(f"expected NAME=VALUE, got {item!r}", param_hint=option)
        found[key] = value
    return found


def json_or_text(value: str) -> Any:
    """The value, where it is JSON, or else the text itself."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def nested(options: dict[str, str], option: str) -> dict[str, Any]:
    """Options whose names have dots, as options within options: ``limits.judge.max_concurrent=8``.

    Raises:
        typer.BadParameter: a name is given a value, and options of its own.
    """
    found: dict[str, Any] = {}
    for path, value in options.items():
        *groups, name = path.split(".")
        group: Any = found
        for part in groups:
            group = group.setdefault(part, {})
            if not isinstance(group, dict):
                raise typer.BadParameter(f"{path}: {part} has a value already", param_hint=option)
        group[name] = json_or_text(value)
    return found
