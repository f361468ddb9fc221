"""The command: what stops it before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from reward_loop.config import RewardModelConfig
from reward_loop.errors import ConfigError
from reward_loop.verl import main_ppo
from reward_loop.verl.cpu.setup import CPU_ENVIRONMENT
from tests.verl.configs import resolved
from tests.verl.runs import write_data

pytestmark = pytest.mark.integration  # starts the command


def run_main(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reward_loop.verl.main_ppo", "--config-name", "cpu", *overrides]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # as container images often set it
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=environment)


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


def test_without_a_function_vllm_needs_a_model_with_logits_by_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForRewardModel"]}')
    model = RewardModelConfig(model_path=str(tmp_path), engine="vllm")
    alone: Any = SimpleNamespace(scores_by_model=True)
    with pytest.raises(ConfigError, match=r"for Qwen2ForRewardModel, only /pooling.*rollout\.name=sglang"):
        main_ppo._check_model(alone, model)
    main_ppo._check_model(alone, model.model_copy(update={"engine": "sglang"}))
    with_function: Any = SimpleNamespace(scores_by_model=False)
    main_ppo._check_model(with_function, model)


def test_an_unknown_manager_stops_the_command_and_a_function_may_import_verl(tmp_path: Path) -> None:
    """The function meets the platform of the run. The check of the manager is the last one before Ray starts."""
    path = tmp_path / "reward.py"
    path.write_text(
        "import os\n"
        "assert 'PYTHONDONTWRITEBYTECODE' not in os.environ\n"  # its processes would all compile their modules
        "from verl.plugin.platform import get_platform\n"
        "from verl.utils.reward_score import default_compute_score\n"
        "assert get_platform().device_name == 'cpu'\n"
        "def compute_score(solution_str): return 1.0\n"
    )
    done = run_main(
        f"custom_reward_function.path={path}", "reward_model.reward_manager=dapa", f"hydra.run.dir={tmp_path}"
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "reward_model.reward_manager=dapa" in done.stderr
    assert "did you mean 'dapo'" in done.stderr


def test_an_unknown_trainer_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer_mode=reward_pipelin: unknown; did you mean 'reward_pipeline'"):
        main_ppo._check_trainer_mode("reward_pipelin")
    for mode in ("sync", "colocate_async", "separate_async", "reward_pipeline"):
        main_ppo._check_trainer_mode(mode)


MANAGERS = """
from reward_loop import RewardLoopManagerBase
class Fine(RewardLoopManagerBase):
    pass
class OnlyConfig(RewardLoopManagerBase):
    def __init__(self, config):
        super().__init__(config)
class NoManager:
    pass
"""


@pytest.mark.parametrize(
    ("manager", "complaint"),
    [
        ("Fine", None),
        ("Fin", r"has no 'Fin'; did you mean 'Fine'"),
        ("NoManager", r"NoManager is not a reward manager"),
        ("OnlyConfig", r"its constructor does not accept these: .*Add \*\*kwargs"),
    ],
)
@pytest.mark.parametrize("by", ["name", "module"])
def test_a_manager_that_cannot_be_created_stops_the_command(
    tmp_path: Path, manager: str, complaint: str | None, by: str
) -> None:
    (tmp_path / "managers.py").write_text(MANAGERS)
    path = f"{tmp_path}/managers.py"
    given = [f"reward_model.reward_manager={path}:{manager}"]
    if by == "module":
        given = [f"reward_model.reward_loop_module_path={path}", f"reward_model.reward_loop_class_name={manager}"]
    settings = resolved(*given)
    if complaint is None:
        main_ppo.check_function(settings)
    else:
        with pytest.raises(ConfigError, match=complaint):
            main_ppo.check_function(settings)


def test_a_manager_whose_module_raises_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "managers.py").write_text("import json\n\njson.loads('{')\n")
    with pytest.raises(ConfigError, match=r"JSONDecodeError.*managers\.py:3\)"):
        main_ppo.check_function(resolved(f"reward_model.reward_manager={tmp_path}/managers.py:Mine"))


def test_check_prints_the_options_in_effect_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(solution_str): return 1.0\n")
    write_data(tmp_path)
    options = [f"custom_reward_function.path={tmp_path}/reward.py", f"hydra.run.dir={tmp_path}"]
    options += [f"data.train_files={tmp_path}/train.parquet", f"data.val_files={tmp_path}/val.parquet"]
    options.append("algorithm.adv_estimator=grpo")
    done = run_main("--check", *options, "reward_model.num_workers=3")
    assert done.returncode == 0, done.stderr
    for line in ("trainer_mode: sync", "num_workers: 3", f"path: {tmp_path}/reward.py", "Reward model: none"):
        assert line in done.stdout
    assert "Started a local Ray instance" not in done.stderr
    steps = ["Composing the", "Reading the options", "Loading the function", "Reading data.train", "Reading data.val"]
    lines = iter(done.stdout.splitlines())
    for step in [*steps, "Importing verl"]:  # in this order
        assert any(line.startswith(step) for line in lines), step
    done = run_main(*options, "trainer.v1.trainer_mode=reward_pipelin", "--check")
    assert done.returncode == 1
    assert "trainer.v1.trainer_mode=reward_pipelin" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_environment_of_a_cpu_run_is_set_before_the_users_function_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many files of reward functions import verl, which chooses its platform then."""
    seen: list[str | None] = []

    def check_function(settings: Any) -> None:
        seen.append(os.environ.get("VERL_PLATFORM"))
        raise InterruptedError

    monkeypatch.setattr(os, "environ", {name: os.environ[name] for name in os.environ if name not in CPU_ENVIRONMENT})
    monkeypatch.setattr(main_ppo, "resolve", lambda config, given: SimpleNamespace(function=None))
    monkeypatch.setattr(main_ppo, "check_function", check_function)
    with pytest.raises(InterruptedError):
        main_ppo.run(OmegaConf.create({"trainer": {"device": "cpu", "nnodes": 1}, "ray_kwargs": {"ray_init": {}}}))
    assert seen == ["cpu"]


def test_flags_may_follow_the_overrides(tmp_path: Path) -> None:
    done = run_main("trainer.nnodes=2", f"hydra.run.dir={tmp_path}", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "use_reward_loop: true" in done.stdout
    assert "nnodes: 2" in done.stdout


def test_hydra_refuses_a_misspelt_key_of_verl(tmp_path: Path) -> None:
    done = run_main("reward_model.enabel=True", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 1
    assert "reward_model.enabel: unknown option; did you mean 'enable'?" in done.stderr
    done = run_main("trainer.nnodez=2", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 1
    assert "nnodez" in done.stderr


def test_help_names_the_options_that_are_ours_and_not_all_of_verls() -> None:
    done = run_main("--help")
    assert done.returncode == 0, done.stderr
    assert "custom_reward_function.path=FILE" in done.stdout
    assert "+reward_model.server.python=FILE" in done.stdout
    assert len(done.stdout.splitlines()) < 40
