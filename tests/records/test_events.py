"""Events of the trainer and advantages: how they are written, and read again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reward_loop import cli
from reward_loop.errors import ConfigError
from reward_loop.records import Records
from reward_loop.records.events import HealthRecords, health, read_events
from reward_loop.records.files import EVENTS, HEALTH
from reward_loop.records.reader import RecordsReader
from reward_loop.records.rows import new_row, phase_event, rollout_event
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


def test_a_rollout_that_failed_ends_now_and_has_no_reward() -> None:
    event = rollout_event("q_2", "q", None, validate=True, start=10.0, times={}, error="RuntimeError: " + "x" * 1000)
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
    assert rows[1]["reward"] == 0.5  # unlike a revision, it does not change the reward
    assert "revised" not in rows[1]


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


def test_a_row_can_have_a_revision_and_an_advantage(tmp_path: Path) -> None:
    writer = Records(tmp_path)
    writer.write(sample("q_0"))
    writer.write({"version": 1, "kind": "revision", "time": 2.0, "uid": "q_0", "reward": 0.75, "masked": False})
    writer.write_advantages(1, {"q_0": 0.25})
    assert writer.flush()
    (row,) = RecordsReader(tmp_path).rows()
    assert (row["reward"], row["advantage"], row["revised"]) == (0.75, 0.25, True)


def test_the_rows_of_some_steps(tmp_path: Path) -> None:
    writer = Records(tmp_path)
    for step in (None, 1, 2, 12):
        writer.write(sample(f"q{step}_0", step=step))
    writer.write_advantages(2, {"q2_0": 0.25})
    assert writer.flush()
    assert [row["uid"] for row in RecordsReader(tmp_path).rows_of([2, 3])] == ["q2_0"]
    assert [row["uid"] for row in RecordsReader(tmp_path).rows_of(range(2, 10**12))] == ["q2_0", "q12_0"]


FIRST = {
    "step": 12,
    "monitor": "masked_share",
    "message": "Since step 10, 30% of the samples are masked (limit 20%). Look at [their] errors.",
    "value": 0.3,
    "threshold": 0.2,
    "since": 10,
}
SECOND = {**FIRST, "step": 20, "monitor": "repetition", "since": 20}


def write_health(folder: Path, *warnings: dict[str, Any]) -> Path:
    writer = HealthRecords(folder)
    writer.write_values(12, {"masked_share": 0.3})
    writer.write_warnings(warnings)
    assert writer.flush()
    (path,) = (folder / HEALTH).iterdir()
    return path


def test_rows_of_health_have_no_fields_of_samples(tmp_path: Path) -> None:
    path = write_health(tmp_path, FIRST)
    assert path.parent == tmp_path / "health"
    values, warning = [json.loads(line) for line in path.read_text().splitlines()]
    assert values.keys() == {"version", "kind", "time", "step", "values"}
    assert (values["step"], values["values"]) == (12, {"masked_share": 0.3})
    assert warning.keys() == {"version", "kind", "time", *FIRST}


def test_a_folder_without_health_has_no_warnings(tmp_path: Path) -> None:
    assert health(tmp_path) == []
    assert health(tmp_path / "missing") == []


def test_the_report_shows_warnings(tmp_path: Path) -> None:
    folder = write(tmp_path, sample("a", score=1.0))
    assert health_of(folder) == ([], False)
    write_health(folder, FIRST, SECOND)
    assert health_of(folder) == ([FIRST, SECOND], True)
    shown = " ".join(CliRunner().invoke(cli.app, ["report", str(folder)]).output.split())
    assert "2 warnings of the live numbers (reward_loop.health): - step 12, masked_share: Since step 10, 30%" in shown
    assert "Look at [their] errors." in shown


def health_of(folder: Path) -> tuple[list[Any], bool]:
    """The warnings in the JSON of the report, and whether the text of the report has warnings."""
    found = json.loads(CliRunner().invoke(cli.app, ["report", str(folder), "--json"]).output)
    return found["warnings"], "health" in CliRunner().invoke(cli.app, ["report", str(folder)]).output


@pytest.mark.parametrize(
    ("sub_folder", "row", "read"),
    [
        (EVENTS, phase_event("gen", 1, 0.0, 1.0), read_events),
        (HEALTH, new_row("warning", **FIRST), health),
    ],
)
def test_incomplete_lines_are_left_out_and_a_newer_version_is_an_error(
    tmp_path: Path, sub_folder: str, row: dict[str, Any], read: Callable[[Path], Iterable[Any]]
) -> None:
    (tmp_path / sub_folder).mkdir()
    file = tmp_path / sub_folder / "host-1-a.jsonl"
    line = json.dumps(row) + "\n"
    file.write_text(line + line + line[:20])
    assert len(list(read(tmp_path))) == 2
    file.write_text(json.dumps(row | {"version": 2}) + "\n")
    with pytest.raises(ConfigError, match="version 2"):
        list(read(tmp_path))
