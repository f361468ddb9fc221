"""The seconds of made-up steps by phase, and the share of judging that was hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reward_loop.errors import ConfigError
from reward_loop.index.phases import StepTimes
from tests.support.made_up import overlap, phases, rollout, write

SYNC = phases(
    1,
    ("gen", 10.0, 18.5, "rewards"),
    ("wait_reward", 19.0, 19.2, "rewards"),
    ("adv", 18.5, 19.5),
    ("update_actor", 19.5, 21.0),
    ("step", 10.0, 22.0),
)
ROLLOUTS = [rollout("a_0", 10.0, 12.0, 12.0, 13.0), rollout("b_0", 10.0, 14.0, 14.0, 18.0)]


def read(folder: Path) -> dict[int, dict[str, Any]]:
    return StepTimes(folder).steps()


def test_the_phases_add_up_to_the_step(tmp_path: Path) -> None:
    step = read(write(tmp_path, SYNC, []))[1]
    assert step["phases"] == {
        "gen": 8.5,
        "wait_reward": pytest.approx(0.2),
        "adv": pytest.approx(0.8),
        "update_actor": 1.5,
        "other": 1.0,
    }
    assert sum(step["phases"].values()) == pytest.approx(12.0)


def test_validation_and_steps_that_still_run_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, [*SYNC, *phases(1, ("testing", 22.0, 25.0)), *phases(2, ("gen", 25.0, 26.0, "rewards"))], [])
    found = read(tmp_path)
    assert list(found) == [1]
    assert "testing" not in found[1]["phases"]


def test_an_update_reads_only_new_events_of_a_growing_folder(tmp_path: Path) -> None:
    rest = [*phases(2, ("gen", 22.0, 30.0, "rewards"), ("step", 22.0, 31.0)), overlap(2, 1.0, 4.0)]
    reader = StepTimes(write(tmp_path / "parts", SYNC[:2], []))
    assert reader.steps() == {}
    write(tmp_path / "parts", ROLLOUTS, [], process="worker-2-b")
    reader.steps()
    write(tmp_path / "parts", SYNC[2:], [])
    assert list(reader.steps()) == [1]
    (path,) = (tmp_path / "parts" / "events").glob("host*")
    with path.open("a") as file:
        file.write('{"version":1,"kind":"phase"')  # an incomplete line
    reader.steps()
    path.write_text(path.read_text().removesuffix('{"version":1,"kind":"phase"'))
    write(tmp_path / "parts", rest, [])
    assert reader.steps() == read(write(tmp_path / "whole", SYNC + rest + ROLLOUTS, []))
    assert [step["hidden_share"] for step in reader.steps().values()] == [None, 0.75]


def test_what_the_trainer_has_measured_is_shown(tmp_path: Path) -> None:
    found = read(write(tmp_path, [*SYNC, *ROLLOUTS, overlap(1, 1.0, 10.0)], []))
    assert (found[1]["waiting_s"], found[1]["hidden_share"]) == (1.0, pytest.approx(0.9))


def test_a_step_that_a_resumed_run_repeats_has_the_phases_of_the_resumed_run(tmp_path: Path) -> None:
    write(tmp_path, SYNC, [])
    write(tmp_path, phases(1, ("gen", 50.0, 51.0), ("step", 50.0, 51.0)), [], process="host-0-b")
    assert read(tmp_path)[1]["phases"] == {"gen": 1.0, "other": 0.0}


def test_events_of_a_newer_version_are_an_error(tmp_path: Path) -> None:
    (newer,) = phases(2, ("step", 22.0, 31.0))
    write(tmp_path, [*SYNC, newer | {"version": 2}], [])
    with pytest.raises(ConfigError, match="version 2"):
        read(tmp_path)
