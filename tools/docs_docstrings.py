"""Griffe's extension for the site (``mkdocs.yml``): docstrings as Markdown, without the marks of reStructuredText."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Rewrites examples and roles, such as ``:class:``, in all docstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
    """Return a docstring with its example as a block of code, and with names instead of roles."""
    docstring = re.sub(r":(?:attr|class|data|exc|func|meth|mod):(?=`)", "", docstring)
    docstring = re.sub(
        r"^Examples?::?\n+((?:(?: {4}.*)?(?:\n|\Z))+?)(?=^\S|\Z)", _example, docstring, flags=re.MULTILINE
    )
    return re.sub(r"::$", ":", docstring, flags=re.MULTILINE)


def _example(found: re.Match[str]) -> str:
    return f"**Example**\n\n```python\n{textwrap.dedent(found[1]).strip()}\n```\n\n"
