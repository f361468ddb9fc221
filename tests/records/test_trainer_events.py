"""Events of the trainer and advantages: how they are written, and read again."""

from __future__ import annotations

import json
from pathlib import Path

from reward_loop.records import Records
from reward_loop.records.files import EVENTS
from reward_loop.records.reader import RecordsReader
from reward_loop.records.trainer_events import read_events
from tests.records.rows import sample


def test_events_are_written_beside_the_rows(tmp_path: Path) -> None:
    writer = Records(tmp_path)
    writer.write(sample("q_0"))
    writer.write_phase("gen", 1, 10.0, 12.0, "rewards")
    times = {"end": 11.0, "scoring": 11.1, "scored": 12.0}
    writer.write_rollout("q_0", "q", 1, validate=False, start=10.0, times=times, error=None)
    assert writer.flush()
    assert [path.parent.name for path in tmp_path.rglob("*.jsonl")].count(EVENTS) == 1
    (path,) = (tmp_path / EVENTS).iterdir()
    assert path.name == writer.path.name
    phase, rollout = map(json.loads, path.read_text().splitlines())
    assert phase == {
        "version": 1,
        "kind": "phase",
        "step": 1,
        "name": "gen",
        "start": 10.0,
        "end": 12.0,
        "waits_for": "rewards",
    }
    assert rollout == {
        "version": 1,
        "kind": "rollout",
        "step": 1,
        "generated_step": None,
        "validate": False,
        "uid": "q_0",
        "group": "q",
        "start": 10.0,
        **times,
        "error": None,
    }
    assert [row["uid"] for row in RecordsReader(tmp_path).rows()] == ["q_0"]


def test_a_rollout_that_failed_ends_now_and_has_no_reward(tmp_path: Path) -> None:
    writer = Records(tmp_path)
    writer.write_rollout("q_2", "q", None, validate=True, start=10.0, times={}, error="RuntimeError: " + "x" * 1000)
    assert writer.flush()
    (event,) = read_events(tmp_path)
    assert event["end"] > 10.0
    assert (event["uid"], event["step"], event["scoring"], event["scored"]) == ("q_2", None, None, None)
    assert len(event["error"]) == 256


def test_only_the_events_of_some_steps_are_read(tmp_path: Path) -> None:
    writer = Records(tmp_path)
    for step in (1, 2, 12):
        writer.write_phase("gen", step, 0.0, 1.0)
    assert writer.flush()
    assert [event["step"] for event in read_events(tmp_path)] == [1, 2, 12]
    assert [event["step"] for event in read_events(tmp_path, [2, 3])] == [2]
    assert [event["step"] for event in read_events(tmp_path, range(2, 10**12))] == [2, 12]
    assert {event["process"] for event in read_events(tmp_path)} == {writer.path.stem}
