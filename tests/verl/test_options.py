from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError
from reward_loop.verl.options import (
    PipelineOptions,
    pipeline_options,
    reward_loop_options,
    reward_model_options,
    scores_by_model,
    without_reward,
)
from tests.verl.configs import settled


@pytest.mark.parametrize("name", ["reward_loop_trainer", "cpu"])
def test_the_defaults_are_settled(name: str) -> None:
    config = settled(name=name)
    assert config.reward_model.use_reward_loop is True
    assert reward_model_options(config) is None


def test_the_yaml_defaults_are_those_of_the_options() -> None:
    assert reward_loop_options(settled()) == RewardLoopConfig()
    assert pipeline_options(settled()) == PipelineOptions()


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("reward_model.reward_manager=dapo", "reward.reward_manager.name", "dapo"),
        ("reward_model.num_workers=3", "reward.num_workers", 3),
        ("custom_reward_function.path=f.py", "reward.custom_reward_function.path", "f.py"),
        ("custom_reward_function.name=judge", "reward.custom_reward_function.name", "judge"),
        ("+custom_reward_function.reward_kwargs.x=1", "reward.custom_reward_function.reward_kwargs.x", 1),
        ("+reward_model.reward_kwargs.max_resp_len=9", "reward.reward_kwargs.max_resp_len", 9),
        ("reward_model.rollout.name=transformers", "reward.reward_model.rollout.name", "transformers"),
        ("sandbox_fusion.url=http://x", "reward.sandbox_fusion.url", "http://x"),
        ("sandbox_fusion.max_concurrent=7", "reward.sandbox_fusion.max_concurrent", 7),
    ],
)
def test_the_keys_that_users_write_take_effect(override: str, key: str, value: object) -> None:
    assert OmegaConf.select(settled(override), key) == value


def test_a_module_path_alone_means_importlib() -> None:
    config = settled("reward_model.reward_loop_module_path=m.py", "reward_model.reward_loop_class_name=Mine")
    manager = config.reward.reward_manager
    assert (manager.source, manager.module.path, manager.name) == ("importlib", "m.py", "Mine")


def test_a_reward_model_is_configured_by_the_old_keys() -> None:
    config = settled(
        "reward_model.enable=True",
        "reward_model.model.path=/m",
        "reward_model.rollout.name=transformers",
        "custom_reward_function.path=f.py",
        "+reward_model.server.replicas=2",
    )
    options = reward_model_options(config)
    assert options is not None
    assert (options.model_path, options.replicas, options.engine) == ("/m", 2, "transformers")


@pytest.mark.parametrize(
    ("overrides", "by_model"),
    [
        ([], True),
        (["custom_reward_function.path=f.py"], False),
        (["reward_model.reward_manager=mine.py:Mine"], False),
        (["reward_model.reward_loop_module_path=m.py", "reward_model.reward_loop_class_name=Mine"], False),
    ],
)
def test_a_reward_model_scores_by_itself_where_there_is_nothing_else(overrides: list[str], by_model: bool) -> None:
    served = ["reward_model.enable=True", "reward_model.model.path=/m", "reward_model.rollout.name=transformers"]
    assert scores_by_model(settled(*served, *overrides)) is by_model
    assert not scores_by_model(settled(*overrides))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            ["reward_model.reward_manager=dapo", "reward.reward_manager.name=gdpo"],
            ["reward_model.reward_manager=dapo", "reward.reward_manager.name=gdpo"],
        ),
        (
            ["custom_reward_function.path=a.py", "reward.custom_reward_function.path=b.py"],
            ["custom_reward_function.path=a.py", "reward.custom_reward_function.path=b.py"],
        ),
        (
            ["reward_model.launch_reward_fn_async=False"],
            ["reward_model.launch_reward_fn_async=False", "reward_model.use_reward_loop=True"],
        ),
        (["+reward_model.use_rewardloop=True"], ["reward_model.use_rewardloop", "did you mean 'use_reward_loop'"]),
        (["+reward_loop.on_fail=mask"], ["reward_loop.on_fail", "did you mean 'on_failed'"]),
        (["+reward.custom_reward_function.nam=f"], ["reward.custom_reward_function.nam"]),
        (["+reward_model.rollout.dtipe=x"], ["reward_model.rollout.dtipe", "did you mean 'dtype'"]),
        (["reward_loop.on_failed=ignore"], ["reward_loop.on_failed"]),
        (["reward_loop.timeout=-1"], ["reward_loop.timeout"]),
        (["reward_model.enable=True", "custom_reward_function.path=f.py"], ["reward_model.model.path"]),
        (
            [
                "reward_model.enable=True",
                "reward_model.model.path=/m",
                "reward_model.rollout.name=transformers",
                "reward_model.reward_manager=dapo",
            ],
            ["reward_model.reward_manager=dapo", "custom_reward_function.path"],
        ),
        (
            [
                "reward_model.enable=True",
                "reward_model.model.path=/m",
                "reward_model.rollout.name=nonesuch",
                "custom_reward_function.path=f.py",
            ],
            ["reward_model.server.engine", "nonesuch"],
        ),
        (
            [
                "reward_model.enable=True",
                "reward_model.model.path=/m",
                "reward_model.rollout.name=transformers",
                "custom_reward_function.path=f.py",
                "+reward_model.server.replica=2",
            ],
            ["reward_model.server.replica", "did you mean 'replicas'"],
        ),
        (["+reward_model.server.replica=2"], ["reward_model.server.replica", "did you mean 'replicas'"]),
        (["reward_model.rollout.dtype=float32"], ["reward.reward_model.rollout.dtype has no effect"]),
        (["reward_model.enable_resource_pool=True"], ["reward.reward_model.enable_resource_pool has no effect"]),
        (
            ["reward_model.enable=True", "reward_model.model.path=/m", "custom_reward_function.path=f.py"],
            ["reward_model.rollout.name"],
        ),
        (["reward_model.use_reward_loop=maybe"], ["reward_model.use_reward_loop=maybe"]),
        (["reward_model.num_workers=0"], ["reward.num_workers=0"]),
        (["trainer.use_v1=False"], ["trainer.use_v1=False"]),
    ],
)
def test_what_cannot_take_effect_is_an_error_that_names_it(overrides: list[str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        settled(*overrides)
    for name in named:
        assert name in str(caught.value)


def test_the_same_value_twice_is_no_contradiction() -> None:
    config = settled("reward_model.reward_manager=dapo", "reward.reward_manager.name=dapo")
    assert config.reward.reward_manager.name == "dapo"


@pytest.mark.parametrize("key", ["reward_model.num_workers", "reward.num_workers"])
def test_the_command_line_goes_before_a_file(key: str) -> None:
    assert settled(f"{key}=3", name="cpu").reward.num_workers == 3


def test_verls_own_reward_is_switched_off_in_a_copy() -> None:
    config = settled("custom_reward_function.path=f.py")
    copy = without_reward(config)
    assert (copy.reward.num_workers, copy.reward.reward_model.enable) == (0, False)
    assert config.reward.num_workers == 8


def run_main(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reward_loop.verl.main_ppo", "--config-name", "cpu", *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (None, "missing.py"),
        ("def compute_scor(solution_str): return 1", "compute_scor"),
        ("import nonesuch_module", "nonesuch_module"),
        ("def compute_score(solution): return 1", "solution"),
    ],
)
def test_a_bad_function_stops_the_command_before_anything_starts(
    tmp_path: Path, function: str | None, complaint: str
) -> None:
    path = tmp_path / "missing.py"
    if function:
        path.write_text(function)
    done = run_main(f"custom_reward_function.path={path}", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 1
    assert "FunctionLoadError" in done.stderr or "ConfigError" in done.stderr
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert "ray" not in done.stdout.lower()


def test_a_reward_model_that_does_not_exist_stops_the_command(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("async def compute_score(solution_str, reward_router_address): return 1.0\n")
    done = run_main(
        "reward_model.enable=True",
        f"reward_model.model.path={tmp_path}/nowhere",
        f"custom_reward_function.path={tmp_path}/f.py",
        f"hydra.run.dir={tmp_path}",
    )
    assert done.returncode == 1
    assert "reward_model.model.path" in done.stderr
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_generative_model_without_a_function_stops_the_command(tmp_path: Path, tiny_generative_model: Path) -> None:
    done = run_main(
        "reward_model.enable=True",
        "reward_model.rollout.name=transformers",
        f"reward_model.model.path={tiny_generative_model}",
        f"hydra.run.dir={tmp_path}",
    )
    assert done.returncode == 1
    assert "is a generative model" in done.stderr
    assert "custom_reward_function.path" in done.stderr
    assert "Traceback" not in done.stderr
    assert "ray" not in done.stdout.lower()


def test_an_unknown_manager_stops_the_command(tmp_path: Path) -> None:
    done = run_main("reward_model.reward_manager=dapa", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 1
    assert "reward_model.reward_manager=dapa" in done.stderr
    assert "did you mean 'dapo'" in done.stderr


def test_flags_may_follow_the_overrides(tmp_path: Path) -> None:
    done = run_main("trainer.nnodes=2", f"hydra.run.dir={tmp_path}", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "use_reward_loop: true" in done.stdout
    assert "nnodes: 2" in done.stdout


def test_hydra_refuses_a_misspelt_key_of_verl(tmp_path: Path) -> None:
    done = run_main("reward_model.enabel=True", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 1
    assert "enabel" in done.stderr
