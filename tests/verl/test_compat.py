"""The check of the installed verl: its version, and the names that the reward loop uses."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from reward_loop.verl import compat
from reward_loop.verl.compat import COMMAND, CPU, TRAINING, Use
from tests.fork_server import module_environment, run_forked
from tests.gsm8k import ROOT

pytestmark = pytest.mark.integration  # imports verl


def test_the_installed_verl_has_all_names() -> None:
    compat.check(*COMMAND, *TRAINING, *CPU)


def modules() -> list[str]:
    """The modules of ``reward_loop.verl`` that import verl or TransferQueue, other than this check."""
    folder = ROOT / "reward_loop" / "verl"
    found = []
    for path in sorted(folder.rglob("*.py")):
        if re.search(r"^ *(from|import) (verl|transfer_queue)\b", path.read_text(), re.MULTILINE):
            found.append(str(path.relative_to(folder).with_suffix("")).replace("/", "."))
    return found


def test_every_module_that_imports_verl_is_checked() -> None:
    assert set(modules()) <= {*COMMAND, *TRAINING, *CPU}


def overridden(module: str) -> set[str]:
    """The methods of verl's classes that the classes of a module override, apart from constructors."""
    names = set()
    for cls in vars(importlib.import_module(f"reward_loop.verl.{module}")).values():
        cls = getattr(cls, "__ray_actor_class__", cls)
        if not inspect.isclass(cls) or cls.__module__ != f"reward_loop.verl.{module}":
            continue
        verls = {name for base in cls.__mro__ if base.__module__.startswith("verl.") for name in vars(base)}
        ours = {name for name, value in vars(cls).items() if inspect.isfunction(value)}
        bases = {name for base in cls.__mro__[1:] if base.__module__.startswith("reward_loop.") for name in vars(base)}
        names |= ours & verls - bases - {"__init__"}
    return names


@pytest.mark.parametrize("module", sorted({*TRAINING, "task_runner"}))
def test_every_override_of_a_method_of_verl_is_registered(module: str) -> None:
    used = compat.registered([module])
    assert overridden(module) <= {use.name.partition("(")[0] for use in used if use.overridden}


def test_few_methods_of_verl_are_overridden() -> None:
    used = compat.registered([*COMMAND, *TRAINING])
    assert len({use.name.partition("(")[0] for use in used if use.overridden}) <= 30


def test_a_removed_method_is_an_error_that_names_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.delattr(PPOTrainer, "_step_once")
    with pytest.raises(compat.VerlVersionError) as caught:
        compat.check(*TRAINING)
    message = str(caught.value)
    assert f"installed verl {compat.installed_version()}; supported: 0.9.1" in message
    assert (
        "verl.trainer.ppo.v1.trainer_base:PPOTrainer._step_once is missing (overridden in reward_loop.verl.trainer)"
        in message
    )


def test_all_differences_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1 import replay_buffer as verls

    def wait(self: Any, partition_id: str, last_debug_time: float, deadline: float) -> float:
        return 0.0

    monkeypatch.setattr(verls.ReplayBuffer, "_wait_for_next_poll", wait)
    monkeypatch.delattr(verls, "_accumulate_eviction_metrics")
    with pytest.raises(compat.VerlVersionError) as caught:
        compat.check(*TRAINING)
    message = str(caught.value)
    assert "replay_buffer:_accumulate_eviction_metrics is missing" in message
    assert "ReplayBuffer._wait_for_next_poll has the parameters (" in message
    assert "instead of (partition_id, last_debug_time)" in message


def problem_of(owner: str, name: str, overridden: bool = False) -> str | None:
    (finding,) = compat.findings([Use("here", owner, name, overridden)])
    return finding.problem


@pytest.mark.parametrize(
    ("owner", "name", "overridden", "problem"),
    [
        ("verl.nonesuch", "x", False, "verl.nonesuch cannot be imported"),
        ("verl.protocol:Nonesuch", "x", False, "verl.protocol:Nonesuch is missing"),
        ("verl.protocol:DataProto", "nonesuch", False, "DataProto.nonesuch is missing (used in here)"),
        ("verl.trainer.main_ppo", "run_ppo(config)", True, "run_ppo has the parameters"),
        ("verl.trainer.main_ppo", "run_ppo(task_runner_class, config)", False, "run_ppo has the parameters"),
        ("verl.trainer.main_ppo", "run_ppo(config, more)", False, "run_ppo has the parameters"),
        ("verl.utils", "hf_tokenizer(name_or_path)", True, "hf_tokenizer has the parameters"),
    ],
)
def test_names_that_differ(owner: str, name: str, overridden: bool, problem: str) -> None:
    assert problem in (problem_of(owner, name, overridden) or "")


def test_attributes_that_a_constructor_sets_count_as_present() -> None:
    assert problem_of("verl.trainer.ppo.v1.replay_buffer:ReplayBuffer", "pending_keys") is None


def test_further_parameters_may_be_there() -> None:
    assert problem_of("verl.trainer.main_ppo", "run_ppo(config, **)", overridden=True) is None


def test_a_module_that_verl_lacks_a_name_for_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "missing.py").write_text(MISSING)
    path = os.pathsep.join([str(tmp_path), module_environment()["PYTHONPATH"]])
    run_forked(["missing"], {**os.environ, "PYTHONPATH": path}, tmp_path, tmp_path / "log")
    printed = (tmp_path / "log").read_text()
    assert "VerlVersionError" in printed
    assert "reward_loop.verl.pipeline cannot be imported" in printed


MISSING = """
import verl.trainer.ppo.v1.utils as utils
from reward_loop.verl import compat
del utils.MetricsAggregator
try:
    compat.check("pipeline")
except compat.VerlVersionError as error:
    print(type(error).__name__, error)
"""


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
