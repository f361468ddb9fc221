"""The trace of made-up steps, as the Trace Event Format requires it."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reward_loop.cli import app
from reward_loop.view import trace as module
from tests.view.made_up import phases, rollout, row, write

STEPS = [
    *phases(1, ("gen", 10.0, 18.5, "rewards"), ("adv", 18.5, 19.5), ("update_actor", 19.5, 21.0), ("step", 10.0, 22.0)),
    *phases(2, ("gen", 22.0, 26.0, "rewards"), ("step", 22.0, 27.0)),
]
ROLLOUTS = [
    rollout("a_0", 10.0, 12.0, 12.0, 13.0),
    rollout("b_0", 10.0, 14.0, 14.0, 18.0),
    rollout("c_0", 14.0, 15.0, 15.0, 16.0),
    rollout("d_0", 22.0, 25.0, 25.0, 25.5, step=2),
]
JUDGE = {"time": 14.5, "seconds": 3.4, "model": "qwen", "backend": "gpu-3"}
ROWS = [row("a_0", 12.0, 13.0), row("b_0", 14.0, 18.0, judges=[JUDGE]), row("d_0", 25.0, 25.5, step=2)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "rewards", STEPS + ROLLOUTS, ROWS)


def run(folder: Path, *options: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["trace", str(folder), "-o", str(folder.parent / "run.json"), *options])
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def slices(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The complete events by the name of their process."""
    events = json.loads((folder.parent / "run.json").read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    lanes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert event.keys() >= {"name", "pid", "tid", "args"}  # what the format requires
        if event["ph"] == "X":
            assert min(event["ts"], event["dur"]) >= 0
            assert event["cat"] in ("rollout", "judge", "trainer")
            lanes[names[event["pid"]]].append(event)
        else:
            assert (event["ph"], event["name"]) in (("M", "process_name"), ("M", "process_sort_index"))
    return lanes


def test_the_trace_has_all_lanes_in_microseconds_from_the_first_span(folder: Path) -> None:
    assert "open it in https://ui.perfetto.dev" in run(folder)
    lanes = slices(folder)
    assert list(lanes) == ["rollouts", "compute_score (judge.py)", "judge qwen at gpu-3", "critical path", "trainer"]
    assert [(s["name"], s["ts"], s["dur"], s["args"]["step"]) for s in lanes["trainer"]] == [
        ("step", 0, 12_000_000, 1),
        ("gen", 0, 8_500_000, 1),
        ("adv", 8_500_000, 1_000_000, 1),
        ("update_actor", 9_500_000, 1_500_000, 1),
        ("step", 12_000_000, 5_000_000, 2),
        ("gen", 12_000_000, 4_000_000, 2),
    ]
    (judge,) = lanes["judge qwen at gpu-3"]
    assert (judge["name"], judge["ts"], judge["dur"], judge["args"]["id"]) == ("b_0", 4_500_000, 3_400_000, "id-b_0")
    assert lanes["critical path"][0]["name"] == "generation of b_0"


def test_slices_of_a_thread_do_not_overlap_unless_one_contains_the_other(folder: Path) -> None:
    run(folder)
    for lane in slices(folder).values():
        for one, other in itertools.combinations(lane, 2):
            if one["tid"] == other["tid"]:
                first, second = sorted((one, other), key=lambda s: (s["ts"], -s["dur"]))
                ends = first["ts"] + first["dur"], second["ts"] + second["dur"]
                assert second["ts"] >= ends[0] or ends[1] <= ends[0]
    assert [(s["name"], s["tid"]) for s in slices(folder)["rollouts"]] == [
        ("b_0", 1),
        ("a_0", 2),
        ("c_0", 1),
        ("d_0", 1),
    ]


@pytest.mark.parametrize(("steps", "names"), [("1", ["a_0", "b_0"]), ("2", ["d_0"]), ("1-2", ["a_0", "b_0", "d_0"])])
def test_only_the_chosen_steps(folder: Path, steps: str, names: list[str]) -> None:
    run(folder, "--step", steps)
    assert [s["name"] for s in slices(folder)["compute_score (judge.py)"]] == names


def test_the_critical_path_of_a_chosen_step_leads_through_samples_of_earlier_ones(folder: Path) -> None:
    late = rollout("e_0", 14.0, 16.0, 17.0, 25.9, generated_step=1)  # the trainer waits for it in step 2
    write(folder, [late], [row("e_0", 17.0, 25.9)])
    found = []
    for options in ((), ("--step", "2")):
        run(folder, *options)
        of_step = [one for one in slices(folder)["critical path"] if one["args"]["step"] == 2]
        found.append([(one["name"], one["dur"]) for one in of_step])
    assert found[1] == found[0] == [("judging of e_0", 3_900_000), ("gen", 100_000), ("other", 1_000_000)]
    assert [one["name"] for one in slices(folder)["rollouts"]] == ["d_0"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--step", "9"), "no records of these steps"),
        (("--step", "2-1"), "the last step is before the first one"),
        (("--step", "one"), "such as 3 or 3-5"),
    ],
)
def test_a_wrong_step_is_an_error_and_writes_no_file(folder: Path, options: tuple[str, ...], problem: str) -> None:
    assert problem in run(folder, *options, code=2)
    assert not (folder.parent / "run.json").exists()


def test_a_trace_that_viewers_cannot_open_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TRACE_SPANS", 3)
    assert "choose some steps with --step" in run(folder, code=2)
