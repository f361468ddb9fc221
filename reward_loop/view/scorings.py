"""One sample in two scorings of the same rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reward_loop._util.paths import look_up
from reward_loop.offline.rows import read_rows
from reward_loop.records.reader import RecordsReader
from reward_loop.types import Outcome, is_returned

__all__ = ["sample_of"]


def sample_of(path: Path, key: str, on: str) -> dict[str, Any] | None:
    """Return the row, the texts and the exchanges of a sample; ``None`` if the scoring does not contain it.

    Args:
        path: a folder of records, or an output of `reward-loop score`, which has no texts and exchanges.
        key: the value that names the sample, as text. Of several records, the latest counts; of a file, the last row.
        on: the field with this value.
    """
    reader = RecordsReader(path) if path.is_dir() else None
    rows = _scored(path) if reader is None else reader.rows(uid=key if on == "uid" else None)
    found = [row for row in rows if str(look_up(row, on)) == key]
    if not found:
        return None
    # Of equal times, the last row counts, as in the comparison.
    row = found[-1] if reader is None else max(reversed(found), key=lambda row: row.get("time") or 0.0)
    if reader is None:
        return {"row": row, "texts": None, "exchanges": []}
    return {"row": row, "texts": reader.text(row), "exchanges": reader.exchanges(row)}


def _scored(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of an output of `reward-loop score` with the names that records have."""
    for row in read_rows(path):
        info = row.columns.get("reward_extra_info")
        components = {name: info[name] for name in info if is_returned(name)} if isinstance(info, Mapping) else {}
        score = row.columns.get("score")
        outcome = row.columns.get("outcome") or str(Outcome.UNSCORED if score is None else Outcome.SCORED)
        yield {**row.columns, "outcome": outcome, "reward": score, "components": components}
