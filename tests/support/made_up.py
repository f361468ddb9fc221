"""Folders of records with made-up events and rows, whose timelines are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def phases(step: int, *found: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Events of phases: name, start, end, and what the trainer waits for."""
    shared = {"version": 1, "kind": "phase", "step": step}
    return [
        {**shared, "name": name, "start": start, "end": end, "waits_for": waits[0] if waits else None}
        for name, start, end, *waits in found
    ]


def overlap(step: int, waiting_s: float, pending_s: float) -> dict[str, Any]:
    """The event of the seconds in which the trainer waited for rewards, and in which they were pending."""
    event = {"version": 1, "kind": "overlap", "time": 9.0, "step": step}
    return {**event, "waiting_s": waiting_s, "pending_s": pending_s}


def rollout(uid: str, start: float, end: float, scoring: float | None, scored: float | None, **more: Any) -> dict:
    """The event of a rollout of step 1."""
    return {
        "version": 1,
        "kind": "rollout",
        "step": 1,
        "validate": False,
        "uid": uid,
        "group": uid.split("_")[0],
        "start": start,
        "end": end,
        "scoring": scoring,
        "scored": scored,
        "error": None,
        **more,
    }


def row(uid: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    """The row of a sample of step 1 that was scored from start to end."""
    return {
        "version": 1,
        "kind": "sample",
        "time": end,
        "uid": uid,
        "group": uid.split("_")[0],
        "step": 1,
        "validate": False,
        "function": "compute_score (judge.py)",
        "outcome": "scored",
        "score": 1.0,
        "reward": 1.0,
        "masked": False,
        "error": None,
        "components": {},
        "total_s": end - start,
        "work_s": end - start,
        "calls": [],
        "judges": [],
        "id": f"id-{uid}",
        **more,
    }


def write(folder: Path, events: list[dict[str, Any]], rows: list[dict[str, Any]], process: str = "host-1-a") -> Path:
    """Write a folder of records, or add a process to it."""
    (folder / "events").mkdir(parents=True, exist_ok=True)
    for path, lines in ((folder / "events", events), (folder, rows)):
        with (path / f"{process}.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return folder
