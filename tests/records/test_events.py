"""Events of the trainer and advantages: how they are written, and read again."""

from __future__ import annotations

import json
from pathlib import Path

from reward_loop.records import Records
from reward_loop.records.events import read_events
from reward_loop.records.files import EVENTS
from reward_loop.records.reader import RecordsReader
from tests.records.rows import sample, write


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


def test_the_advantage_is_that_of_the_last_row_of_the_sample(tmp_path: Path) -> None:
    one, other = Records(tmp_path), Records(tmp_path)
    one.write(sample("q_0", id="early", time=1.0))
    one.write(sample("q_0", time=2.0, reward=0.5))
    one.write(sample("masked_0"))
    other.write_advantages(1, {"q_0": 0.25, "gone_0": 9.0})
    other.write_advantages(2, {"q_0": -1.5})
    assert one.flush()
    assert other.flush()
    rows = list(RecordsReader(tmp_path).rows())
    assert [(row["uid"], row["time"], row.get("advantage")) for row in rows] == [
        ("q_0", 1.0, None),
        ("q_0", 2.0, -1.5),
        ("masked_0", 1.0, None),
    ]
    assert rows[1]["reward"] == 0.5


def test_the_latest_advantage_counts_in_whatever_file_it_is(tmp_path: Path) -> None:
    advantage = {"version": 1, "kind": "advantage", "uid": "q_0", "step": 2}
    write(tmp_path, sample("q_0"), advantage | {"time": 9.0, "advantage": 0.5}, name="host-1-a.jsonl")
    write(tmp_path, advantage | {"time": 3.0, "advantage": -0.5}, name="host-2-b.jsonl")  # before the resume
    assert [row["advantage"] for row in RecordsReader(tmp_path).rows()] == [0.5]


def test_a_sample_has_the_step_that_trains_on_it_and_the_one_that_generated_it(tmp_path: Path) -> None:
    writer = Records(tmp_path)
    for uid, step in (("ahead_0", 2), ("masked_0", None), ("same_0", 1), ("waiting_0", None)):
        writer.write(sample(uid, step=step, generated_step=1))  # only some modes know the step when they score
    writer.write_advantages(2, {"ahead_0": 0.5, "masked_0": None})
    writer.write_advantages(1, {"same_0": 0.5})
    assert writer.flush()
    found = {
        row["uid"]: (row["step"], row.get("generated_step"), row.get("advantage"))
        for row in RecordsReader(tmp_path).rows()
    }
    assert found == {
        "ahead_0": (2, 1, 0.5),
        "masked_0": (2, 1, None),
        "same_0": (1, 1, 0.5),
        "waiting_0": (None, 1, None),
    }
