"""Searches the texts of samples: prompts, responses, and the replies of judges."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from typing import Any

import orjson

from reward_loop.records.lines import parse_line
from reward_loop.view.filters import SampleFilter
from reward_loop.view.index import Index

__all__ = ["TextSearch"]

CACHED = 8
"""The number of searches whose results are kept, for further pages of the same search."""


class TextSearch:
    """Finds samples whose prompt, response or replies contain a text. The case of ASCII letters is ignored.

    The index has no texts: they are read from the segments of the folder.

    Args:
        index: the index.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._found = lru_cache(CACHED)(self._find)

    def find(self, text: str, chosen: SampleFilter) -> list[str]:
        """Return the IDs of the samples that contain a text.

        Args:
            text: the text.
            chosen: the samples to search.
        """
        return self._found(text, chosen.where, tuple(chosen.parameters), self._index.revision)

    def _find(self, text: str, where: str, parameters: tuple[Any, ...], revision: int) -> list[str]:
        needle = _folded(orjson.dumps(text)[1:-1])
        found: dict[str, None] = {}
        for kind, contains in (("text", _text_contains), ("exchange", _reply_contains)):
            places = self._index.rows(
                f"SELECT id, {kind}_file AS file, {kind}_offset AS start, {kind}_bytes AS size FROM samples "
                f"WHERE {kind}_file IS NOT NULL AND {where} ORDER BY file, start",
                parameters,
            )
            for name, lines in self._lines(places):
                # Few lines contain the text: only these are parsed.
                if needle in _folded(lines) and contains(lines, needle):
                    found[name] = None
        return list(found)

    def _lines(self, places: list[dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
        """Yield the IDs of samples and the lines of their texts. Lines of deleted segments are left out."""
        folder = self._index.folder.resolve()
        for name, found in groupby(places, key=lambda place: place["file"]):
            path = (folder / name).resolve()
            if not path.is_relative_to(folder):
                continue  # not written by this library
            with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
                for place in found:
                    yield place["id"], os.pread(file.fileno(), place["size"], place["start"])


def _folded(text: bytes) -> bytes:
    return text.lower()


def _text_contains(lines: bytes, needle: bytes) -> bool:
    return any(_contains(line.get(name), needle) for line in _parsed(lines) for name in ("prompt", "response"))


def _reply_contains(lines: bytes, needle: bytes) -> bool:
    return any(_contains(line.get("reply"), needle) for line in _parsed(lines))


def _contains(value: Any, needle: bytes) -> bool:
    return value is not None and needle in _folded(orjson.dumps(value))


def _parsed(lines: bytes) -> Iterator[Mapping[str, Any]]:
    return (found for line in lines.splitlines(keepends=True) if (found := parse_line(line)) is not None)
