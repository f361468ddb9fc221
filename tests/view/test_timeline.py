"""Timelines of made-up steps: lanes, and the longest phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reward_loop.errors import ConfigError
from reward_loop.index.index import open_index
from reward_loop.view import timeline as module
from tests.support.made_up import phases, rollout, row, write

JUDGE = {"time": 14.5, "seconds": 3.4, "model": "qwen", "backend": "gpu-3", "verdict": 1.0, "status": 200}

SYNC = phases(
    1,
    ("gen", 10.0, 18.5, "rewards"),
    ("old_log_prob", 18.5, 19.0),
    ("adv", 19.0, 19.5),
    ("update_actor", 19.5, 21.0),
    ("update_weights", 21.0, 21.5),
    ("step", 10.0, 22.0),
)
"""A step in which the trainer waits for rollouts and rewards: until 14 s for the slowest rollout, until 18 s for its
reward."""

ROLLOUTS = [rollout("a_0", 10.0, 12.0, 12.0, 13.0), rollout("b_0", 10.0, 14.0, 14.0, 18.0)]
ROWS = [row("a_0", 12.0, 13.0), row("b_0", 14.2, 18.0, judges=[JUDGE])]


def timeline(folder: Path, step: int) -> dict[str, Any]:
    with open_index(folder) as index:
        return module.timeline(index, step)


def lanes(found: dict[str, Any]) -> dict[str, list[tuple[Any, ...]]]:
    return {
        lane["name"]: [(span["name"], span["start"], span["end"], span["id"]) for span in lane["spans"]]
        for lane in found["lanes"]
    }


def test_a_step_has_lanes_for_rollouts_functions_judges_and_the_trainer(tmp_path: Path) -> None:
    found = timeline(write(tmp_path, SYNC + ROLLOUTS, ROWS), 1)
    assert (found["step"], found["start"], found["end"], found["truncated"]) == (1, 10.0, 22.0, 0)
    assert [(lane["name"], lane["kind"]) for lane in found["lanes"]] == [
        ("rollouts", "rollout"),
        ("compute_score (judge.py)", "judge"),
        ("judge qwen at gpu-3", "judge"),
        ("trainer", "trainer"),
    ]
    assert lanes(found) == {
        "rollouts": [("b_0", 10.0, 14.0, "id-b_0"), ("a_0", 10.0, 12.0, "id-a_0")],
        "compute_score (judge.py)": [("a_0", 12.0, 13.0, "id-a_0"), ("b_0", 14.2, 18.0, "id-b_0")],
        "judge qwen at gpu-3": [("b_0", 14.5, 17.9, "id-b_0")],
        "trainer": [(event["name"], event["start"], event["end"], None) for event in SYNC[:-1]],
    }


@pytest.mark.parametrize(
    ("slowest", "sentence"),
    [
        (("update_actor", 14.0, 30.0), "The longest phase was update_actor: 16.0 s of 21.0 s."),
        (
            ("wait_reward", 14.0, 30.0, "rewards"),
            "The longest phase was wait_reward, in which the trainer waited for rewards: 16.0 s of 21.0 s.",
        ),
    ],
)
def test_the_longest_phase_and_what_it_waited_for(tmp_path: Path, slowest: tuple[Any, ...], sentence: str) -> None:
    events = phases(1, ("gen", 10.0, 14.0, "rewards"), slowest, ("step", 10.0, 31.0))
    found = timeline(write(tmp_path, [*events, rollout("a_0", 10.0, 12.0, 12.0, 13.0)], [row("a_0", 12.0, 13.0)]), 1)
    assert found["longest"] == sentence


def test_samples_of_other_steps_are_drawn_where_they_overlap(tmp_path: Path) -> None:
    rollouts = [rollout("old_0", 3.0, 4.0, 4.0, 12.0, step=0), rollout("gone_0", 1.0, 2.0, 2.0, 3.0, step=0)]
    rows = [row("old_0", 4.0, 12.0, step=0), row("gone_0", 2.0, 3.0, step=0), row("far_0", 11.0, 12.0, step=7)]
    found = lanes(timeline(write(tmp_path, SYNC + ROLLOUTS + rollouts, ROWS + rows), 1))
    assert {span[0] for span in found["rollouts"]} == {"a_0", "b_0", "old_0"}
    assert {span[0] for span in found["compute_score (judge.py)"]} == {"a_0", "b_0", "old_0"}


def test_a_step_that_a_resumed_run_repeats_has_the_phases_of_the_resumed_run(tmp_path: Path) -> None:
    write(tmp_path, SYNC + ROLLOUTS, ROWS)
    write(tmp_path, phases(1, ("update_actor", 50.0, 51.0), ("step", 50.0, 51.0)), [], process="host-0-b")
    found = timeline(tmp_path, 1)
    assert (found["start"], found["end"]) == (50.0, 51.0)
    assert lanes(found)["trainer"] == [("update_actor", 50.0, 51.0, None)]


def test_a_step_that_still_runs_has_the_phases_so_far(tmp_path: Path) -> None:
    found = timeline(write(tmp_path, SYNC[:2] + ROLLOUTS, ROWS), 1)
    assert (found["start"], found["end"]) == (10.0, 19.0)
    assert lanes(found)["trainer"][-1] == ("old_log_prob", 18.5, 19.0, None)


def test_a_folder_without_events_has_the_lanes_of_its_rows(tmp_path: Path) -> None:
    found = timeline(write(tmp_path, [], ROWS), 1)
    assert [lane["kind"] for lane in found["lanes"]] == ["judge", "judge"]
    assert (found["start"], found["end"], found["longest"]) == (12.0, 18.0, None)


def test_each_call_of_a_retry_is_a_span(tmp_path: Path) -> None:
    calls = [
        {"function": "exact", "start_s": 0.0, "queue_s": 0.0, "wait_s": 0.0, "work_s": 0.5, "error": None},
        {"function": "judge", "start_s": 0.5, "queue_s": 0.0, "wait_s": 1.0, "work_s": 1.5, "error": "TransientError"},
    ]
    found = timeline(write(tmp_path, [], [row("a_0", 10.0, 14.0, calls=calls)]), 1)
    assert lanes(found) == {"exact": [("a_0", 10.0, 10.5, "id-a_0")], "judge": [("a_0", 10.5, 13.0, "id-a_0")]}
    assert found["lanes"][1]["spans"][0]["detail"]["error"] == "TransientError"


def test_the_shortest_spans_are_left_out_of_a_large_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SPANS", 7)
    found = timeline(write(tmp_path, SYNC + ROLLOUTS, ROWS), 1)
    assert found["truncated"] == 3
    assert lanes(found)["rollouts"] == [("b_0", 10.0, 14.0, "id-b_0")]
    assert len(lanes(found)["trainer"]) == 5


def test_an_unknown_step_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "rewards", SYNC, ROWS)
    with pytest.raises(ConfigError, match="no records of step 9"):
        timeline(tmp_path / "rewards", 9)
