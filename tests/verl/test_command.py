"""verl's own command: what reward_loop changes in it, and that it changes nothing where no option turns it on.

A stand-in for ``verl/trainer/main_ppo.py`` has the same calls in its `main`, but imports no verl. Hydra, the plug-in
and verl's configuration are real.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from omegaconf import DictConfig, OmegaConf

import hydra_plugins.reward_loop_plugin as plugin
from examples import verl_cpu
from reward_loop.config import RetryConfig
from reward_loop.verl import main_ppo
from reward_loop.verl.installed import verl_config_dir
from reward_loop.verl.options import added_options
from tests.support.gsm8k import ROOT

MAIN = """
import hydra

calls = []

def auto_set_device(config):
    calls.append("auto_set_device")

def run_ppo(config, task_runner_class):
    calls.append("run_ppo")

@hydra.main(config_path="config", config_name="ppo_trainer", version_base=None)
def main(config):
    auto_set_device(config)
    calls.append(config)
    run_ppo(config, task_runner_class=None)

if __name__ == "__main__":
    main()
    print("reward_loop is in the configuration:", any("reward_loop" in call for call in calls))
"""
SMALL = """
defaults:
  - legacy_reward_impl
  - _self_
actor_rollout_ref: {rollout: {name: vllm}}
reward: {num_workers: 8, custom_reward_function: {path: null}, reward_manager: {source: register, name: naive}}
trainer: {nnodes: 1, default_local_dir: checkpoints, v1: {trainer_mode: sync, separate_async: {}, sampler: {}}}
"""
"""What most tests need of verl's configuration, which takes a second to compose."""

PIPELINE = "trainer.v1.trainer_mode=reward_pipeline"
ON = "reward_model.use_reward_loop=True"
QUIET = ("hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")


@dataclass
class Command:
    """The stand-in in this process."""

    file: Path
    monkeypatch: pytest.MonkeyPatch
    begun: list[DictConfig] = field(default_factory=list)
    """The configurations with which reward_loop was called."""

    def __call__(self, *words: str) -> DictConfig:
        """Run the command, and return the configuration that verl's ``main`` had after its first call."""
        module = ModuleType("__main__")
        module.__file__ = str(self.file)
        exec(compile(MAIN.partition("if __name__")[0], str(self.file), "exec"), vars(module))
        with self.monkeypatch.context() as patch:
            patch.setitem(sys.modules, "__main__", module)
            patch.setattr(sys, "argv", ["main_ppo", *words, f"hydra.run.dir={self.file.parent}", *QUIET])
            module.main()
        first, config, last = module.calls
        assert (first, last) == ("auto_set_device", "reward_loop trains" if self.begun else "run_ppo")
        return config


@pytest.fixture
def verls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command with verl's whole configuration, without what reward_loop does before and during a training."""
    made = Command(main_file(tmp_path), monkeypatch)

    def begin(config: DictConfig, run_ppo: Callable[..., Any]) -> Callable[..., Any]:
        made.begun.append(config)
        return lambda config, task_runner_class: run_ppo.__globals__["calls"].append("reward_loop trains")

    monkeypatch.setattr(main_ppo, "begin", begin)
    return made


@pytest.fixture
def command(verls: Command) -> Command:
    """The command with the configuration `SMALL`."""
    folder = verls.file.parent / "config"
    folder.unlink()
    folder.mkdir()
    (folder / "ppo_trainer.yaml").write_text(SMALL)
    (folder / "legacy_reward_impl.yaml").symlink_to(verl_config_dir() / "legacy_reward_impl.yaml")
    return verls


def main_file(folder: Path) -> Path:
    file = folder / "verl" / "trainer" / "main_ppo.py"
    file.parent.mkdir(parents=True)
    file.write_text(MAIN)
    (file.parent / "config").symlink_to(verl_config_dir())
    return file


def plain(config: DictConfig) -> Any:
    return OmegaConf.to_container(config)


RECIPE = """
defaults:
  - ppo_trainer
  - _self_
hydra:
  searchpath: ["file://FOLDER"]
recipe: {rate: 1}
"""


def recipe(folder: Path, more: str = "") -> tuple[str, ...]:
    """A configuration in a folder of its own, as verl's recipes have it."""
    (folder / "recipe").mkdir()
    text = RECIPE.replace("FOLDER", str(folder / "verl" / "trainer" / "config")) + more
    (folder / "recipe" / "mine.yaml").write_text(text)
    return ("--config-path", str(folder / "recipe"), "--config-name", "mine")


@pytest.mark.parametrize(
    "words", [(), ("reward.custom_reward_function.path=f.py", "trainer.v1.trainer_mode=separate_async")]
)
def test_a_run_without_the_reward_loop_has_the_configuration_of_verl(verls: Command, words: tuple[str, ...]) -> None:
    config = verls(*words)
    assert verls.begun == []
    with verls.monkeypatch.context() as patch:
        patch.setattr(plugin, "_verls_command", lambda search_path: None)
        assert plain(verls(*words)) == plain(config)


def test_a_run_without_the_reward_loop_imports_nothing_of_it_and_works_where_it_is_broken(tmp_path: Path) -> None:
    file = main_file(tmp_path)
    (tmp_path / "reward_loop").mkdir()
    (tmp_path / "reward_loop" / "__init__.py").write_text("raise RuntimeError('broken')\n")
    (tmp_path / "hydra_plugins").symlink_to(ROOT / "hydra_plugins")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, str(file), *words, f"hydra.run.dir={tmp_path}", *QUIET]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    done = run("reward.custom_reward_function.path=f.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "reward_loop is in the configuration: False\n", "")
    done = run(ON)
    assert done.returncode == 1
    assert "RuntimeError: broken" in done.stderr


@pytest.mark.parametrize("words", [(PIPELINE,), (ON,), ("+" + ON,), ("+mini_batch_pipeline=True",)])
def test_an_option_turns_it_on(command: Command, words: tuple[str, ...]) -> None:
    config = command(*words)
    assert command.begun == [config]


@pytest.mark.parametrize("name", [("--config-name", "ppo_megatron_trainer"), "cpu", "recipe"])
def test_options_need_no_plus_in_any_configuration(verls: Command, tmp_path: Path, name: Any) -> None:
    if name == "cpu":
        name = verl_cpu.ARGUMENTS
    if name == "recipe":
        name = (*recipe(tmp_path), "recipe.rate=2")
    given = {
        "reward_loop.timeout": 7,
        "reward_loop.check": True,
        "reward_loop.health.patience": 9,
        "trainer.v1.reward_pipeline.max_ahead": 3.0,
        "trainer.v1.separate_async.reward_queue.capacity": 5,
        "trainer.v1.sampler.poll_interval_s": 0.5,
    }
    config = verls(*name, PIPELINE, *(f"{key}={value}" for key, value in given.items()))
    assert {key: OmegaConf.select(config, key) for key in given} == given
    assert config.reward_loop.retry.max_attempts == 3
    assert OmegaConf.select(config, "recipe.rate") in (None, 2)
    assert verls.begun == [config]


def test_a_file_turns_it_on_and_its_values_come_before_the_defaults(command: Command, tmp_path: Path) -> None:
    more = "trainer: {v1: {trainer_mode: reward_pipeline}}\nreward_loop: {timeout: 60, retry: {max_attempts: 4}}\n"
    words = recipe(tmp_path, more)
    assert command(*words).reward_loop == {"timeout": 60, "retry": {"max_attempts": 4}}
    config = command(*words, "reward_loop.outage_timeout_s=5")
    assert (config.reward_loop.timeout, config.reward_loop.outage_timeout_s) == (60, 5)
    assert (config.reward_loop.retry.max_attempts, config.reward_loop.retry.max_wait) == (4, RetryConfig().max_wait)
    assert len(command.begun) == 2


def ended(command: Command, capfd: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        command(*words)
    assert end.value.code == 1
    return capfd.readouterr().err


@pytest.mark.parametrize(
    "word",
    ["reward_loop.timeout=60", "trainer.v1.reward_pipeline.max_ahead=3", "reward_loop.check=True"],
)
def test_an_option_of_ours_without_effect_is_an_error(command: Command, word: str) -> None:
    for off in ((), ("reward_model.use_reward_loop=False",)):
        with pytest.raises(SystemExit, match=f"{word} has no effect, .*set {PIPELINE} or {ON}"):
            command(word, *off)
    assert command.begun == []


def test_a_manager_of_ours_in_verls_reward_loop_has_options_with_a_plus(command: Command) -> None:
    config = command("reward.reward_manager.source=importlib", "+reward_loop.timeout=60")
    assert (config.reward_loop, command.begun) == ({"timeout": 60}, [])


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ([PIPELINE, "reward_loop.timout=60"], "timout"),
        ([PIPELINE, "reward_model.enabel=True"], "enabel"),
        ([PIPELINE, "trainer.v1.reward_pipeline.one_step_offpolicy=False"], "one_step_offpolicy"),
        ([ON, "trainer.nnodez=2"], "nnodez"),
        (["reward_model.use_reward_lop=True"], "use_reward_lop"),
    ],
)
def test_hydra_refuses_a_misspelt_option(
    command: Command, capfd: pytest.CaptureFixture[str], words: list[str], key: str
) -> None:
    assert key in ended(command, capfd, *words)
    assert command.begun == []


def keys(node: Any, within: str = "") -> list[str]:
    """The keys of a configuration and of all groups in it."""
    found = {f"{within}{name}": inner for name, inner in node.items()} if isinstance(node, dict) else {}
    return [*found, *(key for name, inner in found.items() for key in keys(inner, f"{name}."))]


def test_no_option_of_verl_is_taken_for_one_of_ours(verls: Command) -> None:
    assert not [key for key in keys(plain(verls())) if plugin._is_ours(f"{key}=1")]


def test_the_plug_in_has_the_names_of_all_options() -> None:
    added = keys(plain(added_options()))
    groups = {key.rpartition(".")[0] for key in added}
    assert set(plugin.OURS) <= set(added)
    assert [key for key in added if key not in groups and not plugin._is_ours(key)] == []


def test_another_verl_is_an_error_only_where_the_reward_loop_is_on(
    command: Command, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.verl.test_command.MAIN", MAIN.replace("auto_set_device", "set_device"))
    with pytest.raises(AssertionError, match="set_device"):
        command()
    assert "VerlVersionError" in ended(command, capfd, ON)


def test_a_program_that_calls_verls_main_is_verls_command(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("verl.trainer.main_ppo")
    monkeypatch.setitem(sys.modules, "verl.trainer.main_ppo", module)
    made = ConfigSearchPathImpl()
    made.append("main", "pkg://verl.trainer.config")  # a recipe's own `main` with verl's configuration
    assert plugin._verls_command(made) is None
    made.append("main", "pkg://verl.trainer/config")
    assert plugin._verls_command(made) is module
