"""The rows of records that count: without those that a resumed run has done again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reward_loop.index.index import open_index


def rows_that_count(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a folder, with the step that trained on each and its advantage."""
    with open_index(folder) as index:
        return list(index.records())
