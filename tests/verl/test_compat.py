"""The check that verl has all names that the reward loop relies on."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from reward_loop.verl import compat

pytestmark = pytest.mark.integration  # imports verl


def test_the_installed_verl_has_all_names() -> None:
    compat.check(compat.COMMAND, compat.TRAINING, compat.CPU)


def test_every_name_has_a_reason() -> None:
    for table in (compat.COMMAND, compat.TRAINING, compat.CPU):
        assert all(why for names in table.values() for why in names.values())


def test_a_removed_method_is_an_error_that_names_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.delattr(PPOTrainer, "_step_once")
    with pytest.raises(compat.VerlVersionError) as caught:
        compat.check(compat.TRAINING)
    message = str(caught.value)
    assert "installed verl 0.9.1; supported: 0.9.1" in message
    assert "verl.trainer.ppo.v1.trainer_base:PPOTrainer._step_once is missing (overridden: skips an update" in message


def test_all_differences_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1 import replay_buffer

    def wait(self: Any, partition_id: str, last_debug_time: float, deadline: float) -> float:
        return 0.0

    monkeypatch.setattr(replay_buffer.ReplayBuffer, "_wait_for_next_poll", wait)
    monkeypatch.delattr(replay_buffer, "_accumulate_eviction_metrics")
    with pytest.raises(compat.VerlVersionError) as caught:
        compat.check(compat.TRAINING)
    message = str(caught.value)
    assert "replay_buffer:_accumulate_eviction_metrics is missing" in message
    assert "ReplayBuffer._wait_for_next_poll has the parameters (" in message
    assert "instead of (partition_id, last_debug_time)" in message


@pytest.mark.parametrize(
    ("owner", "names", "problem"),
    [
        ("verl.nonesuch", {"x": "a reason"}, "verl.nonesuch cannot be imported"),
        ("verl.protocol:Nonesuch", {"x": "a reason"}, "verl.protocol:Nonesuch is missing"),
        ("verl.protocol:DataProto", {"nonesuch": "a reason"}, "DataProto.nonesuch is missing (a reason)"),
        ("verl.trainer.main_ppo", {"run_ppo(config)": "a reason"}, "run_ppo has the parameters"),
        ("verl.trainer.main_ppo", {"run_ppo(task_runner_class, config)": "a reason"}, "run_ppo has the parameters"),
    ],
)
def test_names_that_differ(owner: str, names: dict[str, str], problem: str) -> None:
    with pytest.raises(compat.VerlVersionError) as caught:
        compat.check({owner: names})
    assert problem in str(caught.value)


def test_attributes_that_a_constructor_sets_count_as_present() -> None:
    compat.check({"verl.trainer.ppo.v1.replay_buffer:ReplayBuffer": {"pending_keys": "set in the constructor"}})


def test_another_version_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compat.warn_of_version()
    assert capsys.readouterr().err == ""
    (tmp_path / "version").mkdir()
    (tmp_path / "version" / "version").write_text("0.10.0\n")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin=str(tmp_path / "__init__.py"))
    )
    compat.warn_of_version()
    assert "verl 0.10.0 is installed, and reward_loop supports verl 0.9.1" in capsys.readouterr().err
