"""Rows of samples and folders of records, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def sample(uid: str, **fields: Any) -> dict[str, Any]:
    """Return the row of a sample; its reward is its score."""
    row = {"version": 1, "kind": "sample", "time": 1.0, "id": f"id-{uid}", "uid": uid, "outcome": "scored"}
    return {**row, "reward": fields.get("score"), **fields}


def write(folder: Path, *rows: dict[str, Any], name: str = "host-1-a.jsonl", end: str = "") -> Path:
    """Write rows, and then a text, to a file in a folder; return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return folder
