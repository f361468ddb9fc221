"""Rows of samples and folders of records, written by hand."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from reward_loop.records import records


def sample(uid: str, **fields: Any) -> dict[str, Any]:
    """Return the row of a sample; its reward is its score."""
    row = {"version": 1, "kind": "sample", "time": 1.0, "id": f"id-{uid}", "uid": uid, "outcome": "scored"}
    return {**row, "reward": fields.get("score"), **fields}


def write(folder: Path, *rows: dict[str, Any], name: str = "host-1-a.jsonl", end: str = "") -> Path:
    """Write rows, and then a text, to a file in a folder; return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return folder


async def recorded(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that this process has written to a folder, all of them."""
    writer = records(folder)
    assert await asyncio.to_thread(writer.flush)
    return read(writer.path)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
