"""Samples and groups: pages of a table, and one sample with its whole record."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from reward_loop._util.json import decode, encode
from reward_loop.errors import ConfigError
from reward_loop.index.filters import SampleFilter, SortOrder
from reward_loop.index.index import Index
from reward_loop.index.questions import LARGEST
from reward_loop.records import RecordsReader, parse_line
from reward_loop.view.turns import prompt_turns, response_turns

MAX_LIMIT = 10_000
"""The largest number of rows in an answer."""

MAX_OFFSET = 2**63 - 1

PROMPT = 200
"""The number of characters of a prompt in a row of groups."""

_FIELDS = (
    'id, uid, "group", step, validate, outcome, reward, score, masked, error, components, response_length, total_s, '
    "judge_s, judges, attempts, data_source, function, prompt_tokens, completion_tokens, time"
)

_GROUP_FIELDS = ("step", "validate", "group", "count", "scored", "failed", "mean", "std", "min", "max")

_GROUPS = f"""
SELECT step, validate, "group", count(*) AS count, count(*) FILTER (outcome = 'scored') AS scored,
    count(*) FILTER (outcome = 'failed') AS failed, avg(reward) AS mean,
    stddev_pop(CASE WHEN abs(reward) <= {LARGEST} THEN reward END) AS std,
    min(reward) AS min, max(reward) AS max,
    count(reward) > 1 AND min(reward) = max(reward) AS zero_variance,
    count(*) > 1 AND count(reward) = 0 AS all_failed,
    any_value({{id: id, text_file: text_file, text_offset: text_offset, text_bytes: text_bytes}})
        FILTER (text_file IS NOT NULL) AS place
FROM samples
"""


class SampleQueries:
    """Answers requests for samples and groups.

    Args:
        index: the index.
        reader: reads the texts.
    """

    def __init__(self, index: Index, reader: RecordsReader) -> None:
        self._index = index
        self._reader = reader
        # Not as a decorator: its cache would keep the index alive.
        self._find = lru_cache(_CACHED)(partial(_find, index))

    def page(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return a page of samples.

        Args:
            query: the parameters of the request.

        Raises:
            ConfigError: a parameter is not valid.
        """
        chosen, order = self._filter(query), SortOrder.parse(query)
        offset, limit = _page(query)
        count = self._index.rows(f"SELECT count(*) AS n FROM samples WHERE {chosen.where}", chosen.parameters)
        # Only the rows of the page are read whole.
        rows = self._index.rows(
            f"SELECT {_FIELDS} FROM samples WHERE {chosen.where} ORDER BY {order.sql()} LIMIT {limit} OFFSET {offset}",
            chosen.parameters,
        )
        for row in rows:
            row["components"] = decode(row["components"] or "{}")
        return {"total": count[0]["n"], "offset": offset, "rows": rows}

    def groups(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return a page of groups, with the beginnings of their prompts.

        Raises:
            ConfigError: a parameter is not valid.
        """
        chosen = SampleFilter.parse(query).also('"group" IS NOT NULL')
        sort, order = query.get("sort") or "", query.get("order") or "asc"
        if (sort and sort not in _GROUP_FIELDS) or order not in ("asc", "desc"):
            raise ConfigError(f"Groups cannot be sorted by {sort} {order}. Fields: {', '.join(_GROUP_FIELDS)}")
        offset, limit = _page(query)
        key = f'"{sort}" {order} NULLS LAST, ' if sort else ""
        rows = self._index.rows(
            f"SELECT *, count(*) OVER () AS total FROM ({_GROUPS} WHERE {chosen.where} "
            f'GROUP BY step, validate, "group") ORDER BY {key}step NULLS LAST, validate, "group" '
            f"LIMIT {limit} OFFSET {offset}",
            chosen.parameters,
        )
        total = rows[0]["total"] if rows else 0
        for row in rows:
            del row["total"]
            row["prompt"] = self._prompt(row.pop("place"))
        return {"total": total, "offset": offset, "rows": rows}

    def sample(self, name: str, query: Mapping[str, str]) -> dict[str, Any] | None:
        """Return one sample; ``None`` if there is none.

        Args:
            name: its ID.
            query: the parameters of the table that was shown before, for the previous and the next sample.

        Raises:
            ConfigError: a parameter is not valid.
        """
        order = SortOrder.parse(query)
        known = self._known(name, order)
        if known is None:
            return None
        if (row := self._index.line(known["chunk"], id=name)) is None:  # its file was deleted
            return None
        row |= {field: known[field] for field in ("step", "generated_step")}
        row |= self._advantage(known)
        same = SampleFilter().also("validate = ?", known["validate"])
        # Not IS NOT DISTINCT FROM: only comparisons with = skip row groups.
        same = same.also("step IS NULL") if known["step"] is None else same.also("step = ?", known["step"])
        group = self._index.rows(
            f'SELECT id, uid, reward, outcome FROM samples WHERE {same.where} AND "group" = ? '
            f"ORDER BY {SortOrder.parse({}).sql()} LIMIT {MAX_LIMIT}",
            [*same.parameters, known["group"]],
        )
        chosen = self._filter(query) if query else same
        texts = self._reader.text(row)
        return {
            "row": row,
            "texts": texts,
            "turns": texts and {"prompt": prompt_turns(texts), "response": response_turns(texts)},
            "exchanges": list(self._reader.exchanges(row)),
            "group": group,
            "previous": self._neighbour(known["keys"], chosen, order, reverse=True),
            "next": self._neighbour(known["keys"], chosen, order),
        }

    def _known(self, name: str, order: SortOrder) -> dict[str, Any] | None:
        """Return the row of a sample in the index and its values of the keys of an order; ``None`` if there is none."""
        # The number, the last part of an ID, is found faster than the ID.
        by_number = SampleFilter().also("number = try_cast(? AS BIGINT)", name.rpartition("-")[2])
        for numbered in (by_number, SampleFilter().also("number IS NULL")):
            chosen = numbered.also("id = ?", name)
            found = self._index.rows(
                f"SELECT * EXCLUDE (exchanges), row({order.values()}) AS keys FROM samples "
                f"WHERE {chosen.where} LIMIT 1",
                chosen.parameters,
            )
            if found:
                return found[0]
        return None

    def _advantage(self, known: Mapping[str, Any]) -> dict[str, float]:
        """Return the field ``advantage`` of a sample: the last one, if the sample is the last one with its uid."""
        latest = "SELECT arg_max(advantage, time) AS advantage FROM advantages WHERE uid = ?"
        found = self._index.rows(latest, [known["uid"]])
        if found[0]["advantage"] is None:
            return {}
        later = "SELECT 1 FROM samples WHERE time >= $time AND uid = $uid AND (time > $time OR id > $id) LIMIT 1"
        return {} if self._index.rows(later, {name: known[name] for name in ("time", "uid", "id")}) else found[0]

    def _filter(self, query: Mapping[str, str]) -> SampleFilter:
        chosen = SampleFilter.parse(query)
        text = query.get("text")
        if not text:
            return chosen
        found = self._find(text, chosen.where, tuple(chosen.parameters), self._index.revision)
        return chosen.also("id IN (SELECT unnest(?))", found)

    def _neighbour(
        self, keys: Sequence[Any], chosen: SampleFilter, order: SortOrder, reverse: bool = False
    ) -> str | None:
        beyond = order.beyond(keys, reverse)
        rows = self._index.rows(
            f"SELECT id FROM samples WHERE {chosen.where} AND {beyond.where} ORDER BY {order.sql(reverse)} LIMIT 1",
            [*chosen.parameters, *beyond.parameters],
        )
        return rows[0]["id"] if rows else None

    def _prompt(self, place: Mapping[str, Any] | None) -> str | None:
        """Return the beginning of the prompt of a sample whose texts were recorded."""
        texts = None if place is None else self._reader.text(place)
        prompt = (texts or {}).get("prompt")
        if isinstance(prompt, list):  # messages: the last one differs between prompts
            last = prompt[-1] if prompt else None
            prompt = last.get("content") if isinstance(last, dict) else last
        return None if prompt is None else str(prompt)[:PROMPT]


def _page(query: Mapping[str, str]) -> tuple[int, int]:
    """Return offset and limit of a request."""
    try:
        offset, limit = int(query.get("offset") or 0), int(query.get("limit") or 100)
    except ValueError:
        raise ConfigError("offset and limit must be whole numbers") from None
    if not 0 <= offset <= MAX_OFFSET or not 0 < limit <= MAX_LIMIT:
        raise ConfigError(f"offset must be from 0 to {MAX_OFFSET}, and limit from 1 to {MAX_LIMIT}")
    return offset, limit


_CACHED = 8
"""The number of searches whose results are kept, for further pages of the same search."""


def _find(index: Index, text: str, where: str, parameters: tuple[Any, ...], revision: int) -> list[str]:
    """Return the IDs of the samples whose prompt, response or replies contain a text; ASCII letters match in any case.

    The index has no texts: they are read from the segments of the folder.

    Args:
        index: the index.
        text: the text.
        where: the condition on the samples to search, as SQL.
        parameters: its parameters.
        revision: that of the index; new rows make the results that are kept invalid.
    """
    # As it stands in a line of JSON, so that most lines need not be parsed.
    needle = orjson.dumps(text)[1:-1].lower()
    found: dict[str, None] = {}
    for kind, fields in (("text", ("prompt", "response")), ("exchange", ("reply",))):
        places = index.rows(
            f"SELECT id, {kind}_file AS file, {kind}_offset AS start, {kind}_bytes AS size FROM samples "
            f"WHERE {kind}_file IS NOT NULL AND {where} ORDER BY file, start",
            parameters,
        )
        for name, lines in _lines(index.folder.resolve(), places):
            # Few lines contain the text: only these are parsed.
            if needle in lines.lower() and _contains(lines, needle, fields):
                found[name] = None
    return list(found)


def _lines(folder: Path, places: list[dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """Yield the IDs of samples and the lines of their texts. Lines of deleted segments are left out."""
    for name, found in groupby(places, key=lambda place: place["file"]):
        path = (folder / name).resolve()
        if not path.is_relative_to(folder):
            continue  # not written by this library
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            for place in found:
                yield place["id"], os.pread(file.fileno(), place["size"], place["start"])


def _contains(lines: bytes, needle: bytes, fields: Sequence[str]) -> bool:
    """Return whether one of some fields of the lines contains a text, which is in lower case."""
    parsed = (found for line in lines.splitlines(keepends=True) if (found := parse_line(line)) is not None)
    values = (line.get(name) for line in parsed for name in fields)
    return any(value is not None and needle in encode(value).lower() for value in values)
