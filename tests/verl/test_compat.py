"""The check of the installed verl: its version, and the names that the reward loop uses."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from reward_loop.verl import (
    agent_loop,
    compat,
    pipeline,
    recording_trainer,
    replay_buffer,
    separate_async,
    task_runner,
    trainer,
)
from tests.gsm8k import ROOT

pytestmark = pytest.mark.integration  # imports verl


def test_the_installed_verl_has_all_names() -> None:
    compat.check(compat.COMMAND, compat.TRAINING, compat.CPU)


def test_every_name_has_a_reason() -> None:
    for table in (compat.COMMAND, compat.TRAINING, compat.CPU):
        assert all(why for names in table.values() for why in names.values())


def overrides(cls: type) -> set[str]:
    """The methods of a class of ours that override methods of verl's classes, apart from the constructor."""
    verls = {name for base in cls.__mro__ if base.__module__.startswith("verl.") for name in vars(base)}
    return {name for name, value in vars(cls).items() if inspect.isfunction(value)} & verls - {"__init__"}


@pytest.mark.parametrize(
    "cls",
    [
        agent_loop.RewardAgentLoopWorker,
        pipeline.RewardPipelineTrainer,
        recording_trainer.RecordingTrainer,
        replay_buffer.RewardReplayBuffer,
        separate_async.QueueAgentLoopWorker,
        separate_async.QueueSeparateAsyncTrainer,
        task_runner.TaskRunner.__ray_actor_class__,
        trainer.RewardLoopTrainer,
    ],
)
def test_every_override_of_a_method_of_verl_is_listed(cls: type) -> None:
    listed = {
        name.partition("(")[0]
        for names in [*compat.TRAINING.values(), *compat.COMMAND.values()]
        for name, why in names.items()
        if why.startswith("overridden")
    }
    assert overrides(cls)
    assert overrides(cls) <= listed


def test_a_removed_method_is_an_error_that_names_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.delattr(PPOTrainer, "_step_once")
    with pytest.raises(compat.VerlVersionError) as caught:
        compat.check(compat.TRAINING)
    message = str(caught.value)
    assert f"installed verl {compat.installed_version()}; supported: 0.9.1" in message
    assert "verl.trainer.ppo.v1.trainer_base:PPOTrainer._step_once is missing (overridden: skips an update" in message


def test_all_differences_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1 import replay_buffer as verls

    def wait(self: Any, partition_id: str, last_debug_time: float, deadline: float) -> float:
        return 0.0

    monkeypatch.setattr(verls.ReplayBuffer, "_wait_for_next_poll", wait)
    monkeypatch.delattr(verls, "_accumulate_eviction_metrics")
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
        ("verl.trainer.main_ppo", {"run_ppo(config, more)": "a reason"}, "run_ppo has the parameters"),
        ("verl.utils", {"hf_tokenizer(name_or_path)": "overridden: a reason"}, "hf_tokenizer has the parameters"),
    ],
)
def test_names_that_differ(owner: str, names: dict[str, str], problem: str) -> None:
    with pytest.raises(compat.VerlVersionError) as caught:
        compat.check({owner: names})
    assert problem in str(caught.value)


def test_attributes_that_a_constructor_sets_count_as_present() -> None:
    compat.check({"verl.trainer.ppo.v1.replay_buffer:ReplayBuffer": {"pending_keys": "set in the constructor"}})


def test_further_parameters_may_be_there() -> None:
    compat.check({"verl.trainer.main_ppo": {"run_ppo(config, **)": "overridden, with further parameters"}})


def install(folder: Path, version: str) -> None:
    """Makes a package verl of a version, which must not be imported."""
    (folder / "verl" / "version").mkdir(parents=True)
    (folder / "verl" / "version" / "version").write_text(f"{version}\n")
    (folder / "verl" / "__init__.py").write_text("raise ImportError('verl was imported')\n")


def use(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    spec = ModuleSpec("verl", None, origin=str(folder / "verl" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


@pytest.mark.parametrize("version", ["0.9.2", "0.10.0.dev", "1.0", "an unusual version"])
def test_another_version_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    compat.check_version()
    assert capsys.readouterr().err == ""
    install(tmp_path, version)
    use(monkeypatch, tmp_path)
    compat.check_version()
    assert f"verl {version} is installed. reward_loop is tested with verl 0.9.1" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["0.8.0", "0.9.0"])
def test_an_older_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(tmp_path, version)
    use(monkeypatch, tmp_path)
    with pytest.raises(compat.VerlVersionError, match=f"verl {version} is installed.*needs verl 0.9.1 or later"):
        compat.check_version()


def test_an_older_version_stops_the_command_before_verl_is_imported(tmp_path: Path) -> None:
    install(tmp_path, "0.8.0")
    done = subprocess.run(
        [sys.executable, "-m", "reward_loop.verl.main_ppo", "trainer.nnodes=1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "verl 0.8.0 is installed, and reward_loop needs verl 0.9.1 or later: pip install verl==" in done.stderr
    assert "Traceback" not in done.stderr
