"""The agreement of the verdicts of judges with labels: numbers in the samples, such as the scores of people."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from reward_loop._util.paths import MISSING, look_up
from reward_loop._util.text import did_you_mean, listing
from reward_loop.offline.agreement import Agreement, Pair, agreement
from reward_loop.records.reader import RecordsReader
from reward_loop.view.filters import BadRequestError, SampleFilter
from reward_loop.view.index import Index

__all__ = ["Labels"]

LABELLED = 2000
"""The largest number of samples that are compared: the newest ones. Labels may be among the texts, which are files."""

TRIED = 20
"""The number of samples whose fields may be labels."""

DEFAULTS = ("extra_info.label", "components.label")
"""The labels that are used if a request names none."""

NONE = "none"
"""The name of a label that compares nothing."""

Judge = tuple[str | None, str | None, str | None]
"""Model, backend and function."""

_PLACE = "id, text_file, text_offset, text_bytes, components"

# The exchanges of a batch belong to several samples, so they have no label.
_NEWEST = "SELECT rowid FROM samples WHERE {where} AND judges > 0 AND batch IS NULL ORDER BY time DESC LIMIT {limit}"
_SAMPLES = f"SELECT {_PLACE} FROM samples WHERE rowid IN ({_NEWEST})"
_VERDICTS = f"""
SELECT {_PLACE}, function, coalesce(e.model, e.url) AS model, e.backend, e.score AS verdict
FROM (SELECT {_PLACE}, function, unnest(exchanges) AS e FROM samples WHERE rowid IN ({_NEWEST}))
WHERE isfinite(e.score)
"""


class Labels:
    """The labels of samples.

    Args:
        index: the index.
        reader: reads texts, for labels that are among them: ``ground_truth`` and ``extra_info.NAME``.
    """

    def __init__(self, index: Index, reader: RecordsReader) -> None:
        self._index = index
        self._reader = reader

    def fields(self, chosen: SampleFilter) -> list[str]:
        """Return the fields of the newest samples with numbers: components, ``ground_truth`` and extra info."""
        found: dict[str, None] = {}
        for sample in self._index.rows(_SAMPLES.format(where=chosen.where, limit=TRIED), chosen.parameters):
            fields = self._fields(sample)
            for group in ("components", "extra_info"):
                names = fields.get(group)
                for name, value in names.items() if isinstance(names, Mapping) else ():
                    if isinstance(value, int | float):
                        found[f"{group}.{name}"] = None
            if _number(fields.get("ground_truth")) is not None:
                found["ground_truth"] = None
        return sorted(found)

    def choose(self, name: str | None, fields: Sequence[str]) -> str | None:
        """Return the label of a request.

        Args:
            name: the label that the request names.
            fields: the known fields.

        Returns:
            ``None`` for no label.

        Raises:
            BadRequestError: there is no such field.
        """
        if name is None:
            return next((field for field in DEFAULTS if field in fields), None)
        if name == NONE:
            return None
        if name != "ground_truth" and not name.startswith(("components.", "extra_info.")):
            raise BadRequestError(
                f"label must be ground_truth, components.NAME or extra_info.NAME, not {name!r}"
                f"{did_you_mean(name, fields) or '.'} Fields with numbers: {listing(fields)}"
            )
        return name

    def agreements(self, label: str, chosen: SampleFilter) -> dict[Judge, Agreement]:
        """Return how the verdicts of each judge agree with a label, in the newest samples.

        Args:
            label: the field.
            chosen: the samples.
        """
        pairs: dict[Judge, list[Pair]] = defaultdict(list)
        known: dict[str, float | None] = {}
        for row in self._index.rows(_VERDICTS.format(where=chosen.where, limit=LABELLED), chosen.parameters):
            if row["id"] not in known:
                fields = _components(row) if label.startswith("components.") else self._fields(row)
                known[row["id"]] = _number(look_up(fields, label))
            number = known[row["id"]]
            if number is not None:
                pairs[row["model"], row["backend"], row["function"]].append((row["verdict"], number))
        return {judge: agreement(found) for judge, found in pairs.items()}

    def _fields(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return {**(self._reader.text(sample) or {}), **_components(sample)}


def _components(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {"components": orjson.loads(sample["components"] or "{}")}


def _number(value: Any) -> float | None:
    if value is MISSING or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
