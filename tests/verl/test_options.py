from __future__ import annotations

import importlib.metadata
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

VLLM = [
    "reward_model.enable=True",
    "reward_model.model.path=/m",
    "reward_model.rollout.name=vllm",
    "custom_reward_function.path=f.py",
]
PIPELINE = "trainer.v1.trainer_mode=reward_pipeline"
OWN_GPUS = ["the trainer's GPUs", "reward_model.enable_resource_pool=True"]
EXTERNAL = [
    *("reward_model.enable=True", "reward_model.model.path=/m", "reward_model.rollout.name=external"),
    *("+reward_model.server.urls=[http://127.0.0.1:1]", "custom_reward_function.path=f.py"),
]
POOL = ["reward_model.enable_resource_pool=True", "reward_model.n_gpus_per_node=8", "reward_model.nnodes=2"]


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vLLM that is installed here is one for GPUs."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.31.0")


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


def test_verls_limits_reach_whoever_keeps_them_for_all_workers() -> None:
    config = settled("reward_model.reward_manager=rate_limited", "+reward.max_concurrent=6", "+reward.max_rpm=500")
    limit = reward_loop_options(config).limits["default"]
    assert (limit.max_concurrent, limit.requests_per_minute) == (6, 500)


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


def test_verls_options_of_an_engine_reach_it() -> None:
    options = reward_model_options(
        settled(
            *VLLM,
            *POOL,
            "reward_model.rollout.tensor_model_parallel_size=4",
            "reward_model.rollout.gpu_memory_utilization=0.8",
            "reward_model.rollout.max_model_len=4096",
            "reward_model.rollout.max_num_seqs=64",
            "+reward_model.rollout.engine_kwargs.vllm.swap_space=0",
            "+reward_model.server.start_timeout_s=60",
        )
    )
    assert options is not None
    assert (options.engine, options.placement, options.replicas) == ("vllm", "ray", 4)
    assert (options.tensor_parallel_size, options.gpu_memory_utilization, options.dtype) == (4, 0.8, "bfloat16")
    assert (options.max_model_len, options.start_timeout_s) == (4096, 60)
    assert options.engine_args == {"max_num_seqs": 64, "swap_space": 0}


def test_sglang_gets_its_own_names() -> None:
    overrides = ["reward_model.rollout.name=sglang", "reward_model.rollout.max_num_seqs=64"]
    options = reward_model_options(settled(*VLLM, *POOL, *overrides))
    assert options is not None
    assert options.engine_args == {"max_running_requests": 64}


def test_on_a_cpu_vllm_needs_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.31.0+cpu")
    options = reward_model_options(settled(*VLLM))
    assert options is not None
    assert options.placement == "local"


def test_without_a_pool_the_model_shares_the_trainers_gpus() -> None:
    overrides = ["trainer.n_gpus_per_node=8", "trainer.nnodes=2", "reward_model.use_reward_loop=True"]
    judge = ["+reward_model.server.models.judge.model_path=/j", "+reward_model.server.models.judge.engine=vllm"]
    options = reward_model_options(settled(*VLLM, *overrides, *judge))
    assert options is not None
    assert (options.placement, options.tensor_parallel_size, options.replicas) == ("colocated", 2, 8)
    assert (options.enable_sleep_mode, options.models["judge"].enable_sleep_mode) == (True, True)
    options = reward_model_options(settled(*VLLM, *overrides, "+reward_model.server.replicas=3"))
    assert options is not None
    assert options.replicas == 3
    options = reward_model_options(settled(*VLLM, *overrides, "+reward_model.server.placement=local"))
    assert options is not None
    assert (options.placement, options.replicas, options.enable_sleep_mode) == ("local", 1, False)
    in_pipeline = [PIPELINE, "trainer.v1.reward_pipeline.one_step_off_policy=False"]
    assert reward_model_options(settled(*VLLM, *overrides, *in_pipeline)) is not None


def test_more_models_beside_verls() -> None:
    overrides = ["+reward_model.server.models.judge.model_path=/j", "+reward_model.server.models.judge.engine=vllm"]
    options = reward_model_options(settled(*VLLM, *POOL, *overrides))
    assert options is not None
    assert options.models["judge"].model_path == "/j"
    with pytest.raises(ConfigError, match="did you mean 'model_path'"):
        settled(*VLLM, *POOL, "+reward_model.server.models.judge.model_pat=/j")


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
        (
            ["reward_model.enable_resource_pool=True"],
            ["reward_model.enable_resource_pool=True has no effect", "reward_model.enable=True"],
        ),
        (
            [*VLLM, "trainer.n_gpus_per_node=1"],
            ["the trainer's GPUs: nnodes=1 with n_gpus_per_node=1", "2 GPU"],
        ),
        ([*VLLM, "+reward_model.server.replicas=5"], ["reward_model.server.replicas=5", "have room for 4"]),
        (
            [*VLLM, *(f"+reward_model.server.models.j.{option}" for option in ("model_path=/j", "replicas=9"))],
            ["reward_model.server.models.j.replicas=9", "have room for 8"],
        ),
        ([*VLLM, "trainer.v1.trainer_mode=separate_async"], ["trainer_mode=separate_async", *OWN_GPUS]),
        ([*VLLM, PIPELINE], ["one_step_off_policy=True", "Set it to False", *OWN_GPUS]),
        ([*VLLM, "algorithm.filter_groups.enable=True"], ["algorithm.filter_groups.enable=True", *OWN_GPUS]),
        ([*VLLM, "reward_model.launch_reward_fn_async=True"], ["launch_reward_fn_async=True", "Leave it out"]),
        (
            [*VLLM, "actor_rollout_ref.rollout.free_cache_engine=False"],
            ["actor_rollout_ref.rollout.free_cache_engine=False", "Set it to True"],
        ),
        (
            [*EXTERNAL, "+reward_model.server.placement=colocated"],
            ["reward_model.server.placement=colocated", "Leave out placement"],
        ),
        ([*VLLM, "reward_model.enable_resource_pool=True"], ["nnodes=0 with n_gpus_per_node=8 have no room", "2 GPU"]),
        ([*VLLM, *POOL, "+reward_model.server.replicas=2"], ["reward_model.server.replicas contradicts"]),
        ([*VLLM, *POOL, "reward_model.rollout.tensor_model_parallel_size=16"], ["a server of 16 GPU(s)"]),
        (
            [*VLLM, *POOL, "reward.reward_model.rollout.temperature=0.5"],
            ["rollout.temperature has no effect", "name=vllm"],
        ),
        ([*VLLM, *POOL, "+reward_model.rollout.engine_kwargs.sglang.x=1"], ["engine_kwargs.sglang", "vllm.*"]),
        (
            ["reward_model.enable=True", "reward_model.model.path=/m", "custom_reward_function.path=f.py"],
            ["reward_model.rollout.name"],
        ),
        (["+reward.max_rpm=5"], ["reward.max_rpm", "reward_manager=rate_limited"]),
        (["algorithm.adv_estimator=gdpo"], ["algorithm.gdpo_reward_keys"]),
        (
            [
                "algorithm.adv_estimator=gdpo",
                "+algorithm.gdpo_reward_keys=[a,b]",
                "+algorithm.gdpo_reward_weights=[1]",
            ],
            ["algorithm.gdpo_reward_weights", "got 1"],
        ),
        (["+reward_loop.components.a.path=f.py"], ["reward_loop.components", "reward_manager=composite"]),
        (
            ["reward_model.reward_manager=composite", "+reward_loop.components.a.pth=f.py"],
            ["reward_loop.components.a.pth", "did you mean 'path'"],
        ),
        (
            [
                "reward_model.reward_manager=composite",
                "+reward_loop.components.a.path=f.py",
                "custom_reward_function.path=g.py",
            ],
            ["custom_reward_function.path=g.py has no effect"],
        ),
        (["+reward_loop.group.sise=2"], ["reward_loop.group.sise", "did you mean 'size'"]),
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
