"""The seconds of made-up steps by phase, and the share of judging that was hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reward_loop.errors import ConfigError
from reward_loop.view import phases as module
from reward_loop.view.phases import PhaseReader
from tests.view.made_up import phases, rollout, write

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
    return PhaseReader(folder).steps()


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


def test_waiting_is_the_wait_for_the_last_reward_and_the_phase_wait_reward(tmp_path: Path) -> None:
    step = read(write(tmp_path, SYNC + ROLLOUTS, []))[1]
    assert step["waiting_s"] == pytest.approx(4.0 + 0.2)
    # Rewards were pending from 12 to 13 s, and from 14 to 18 s.
    assert step["hidden_share"] == pytest.approx(1 - 4.2 / 5)


def test_judging_behind_generation_and_updates_is_hidden(tmp_path: Path) -> None:
    events = phases(
        1,
        ("gen", 10.0, 14.0, "rollouts"),
        ("update_actor", 14.0, 17.0),
        ("wait_reward", 17.0, 18.0, "rewards"),
        ("update_actor", 18.0, 19.0),
        ("step", 10.0, 19.0),
    )
    step = read(write(tmp_path, events + ROLLOUTS, []))[1]
    assert step["phases"]["update_actor"] == 4.0
    assert step["waiting_s"] == pytest.approx(1.0)
    assert step["hidden_share"] == pytest.approx(1 - 1 / 5)


@pytest.mark.parametrize(
    ("first", "waiting"),
    [(("update_actor", 1.0, 2.0), 0.0), (("gen", 1.0, 2.0, "rewards"), None), (("gen", 1.0, 2.0, "rollouts"), 0.0)],
)
def test_a_step_without_pending_rewards_has_no_hidden_share(
    tmp_path: Path, first: tuple[Any, ...], waiting: float | None
) -> None:
    step = read(write(tmp_path, phases(1, first, ("step", 1.0, 2.0)), []))[1]
    assert (step["waiting_s"], step["hidden_share"]) == (waiting, None)


def test_a_step_whose_rewards_had_all_arrived_before_has_waited_0_s(tmp_path: Path) -> None:
    later = phases(2, ("gen", 40.0, 40.1, "rewards"), ("step", 40.0, 42.0))
    step = read(write(tmp_path, SYNC + ROLLOUTS + later, []))[2]
    assert (step["waiting_s"], step["hidden_share"]) == (0.0, None)


def test_validation_and_steps_that_still_run_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, [*SYNC, *phases(1, ("testing", 22.0, 25.0)), *phases(2, ("gen", 25.0, 26.0, "rewards"))], [])
    found = read(tmp_path)
    assert list(found) == [1]
    assert "testing" not in found[1]["phases"]


def test_an_update_reads_only_new_events_of_a_growing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MANY", 1)
    rest = [
        *phases(2, ("gen", 22.0, 30.0, "rewards"), ("step", 22.0, 31.0)),
        rollout("c_0", 20.0, 21.0, 21.0, 29.0, step=2),
    ]
    reader = PhaseReader(write(tmp_path / "parts", SYNC[:2], []))
    assert reader.steps() == {}
    write(tmp_path / "parts", [*ROLLOUTS, rest[-1]], [], process="worker-2-b")
    reader.steps()
    write(tmp_path / "parts", SYNC[2:], [])
    assert list(reader.steps()) == [1]
    (path,) = (tmp_path / "parts" / "events").glob("host*")
    with path.open("a") as file:
        file.write('{"version":1,"kind":"phase"')  # an incomplete line
    reader.steps()
    path.write_text(path.read_text().removesuffix('{"version":1,"kind":"phase"'))
    write(tmp_path / "parts", rest[:-1], [])
    whole = write(tmp_path / "whole", SYNC + rest + ROLLOUTS, [])
    assert reader.steps() == read(whole)
    assert read(whole)[2]["waiting_s"] == pytest.approx(7.0)
    assert read(whole)[1]["hidden_share"] == pytest.approx(1 - 4.2 / 5)
    assert read(whole)[2]["hidden_share"] == pytest.approx(1 - 7 / 8)  # `c_0` was requested in the step before


def test_a_reward_counts_in_the_step_that_trains_on_it(tmp_path: Path) -> None:
    events = [
        *phases(1, ("gen", 0.0, 2.0, "rollouts"), ("wait_reward", 2.0, 3.0, "rewards"), ("step", 0.0, 10.0)),
        *phases(2, ("wait_reward", 10.0, 11.0, "rewards"), ("step", 10.0, 20.0)),
        rollout("a_0", 0.0, 1.0, 1.0, 3.0),
        rollout("b_0", 1.0, 2.0, 2.0, 9.0, step=2, generated_step=1),
        rollout("c_0", 1.0, 2.0, 9.0, 11.0, step=None, generated_step=1),  # known is only when it arrived
    ]
    found = read(write(tmp_path, events, []))
    assert [found[step]["hidden_share"] for step in (1, 2)] == pytest.approx([1 - 1 / 2, 1 - 1 / 9])


def test_what_the_trainer_has_measured_is_shown(tmp_path: Path) -> None:
    overlap = {"version": 1, "kind": "overlap", "time": 9.0, "step": 1, "waiting_s": 1.0, "pending_s": 10.0}
    found = read(write(tmp_path, [*SYNC, *ROLLOUTS, overlap], []))
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
