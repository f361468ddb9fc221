"""How the reward model is served, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from reward_loop.config import RewardModelConfig
from reward_loop.errors import ConfigError
from reward_loop.serving.engines import ENGINES
from reward_loop.serving.models import served_models
from reward_loop.verl.run.reward_model import verls_options
from tests.verl.configs import resolved

VLLM = [
    "reward_model.enable=True",
    "reward_model.model.path=/m",
    "reward_model.rollout.name=vllm",
    "custom_reward_function.path=f.py",
]
PIPELINE = "trainer.v1.trainer_mode=reward_pipeline"
EXTERNAL = [
    *("reward_model.enable=True", "reward_model.rollout.name=external"),
    *("+reward_model.server.urls=[http://127.0.0.1:1]", "custom_reward_function.path=f.py"),
]
POOL = ["reward_model.enable_resource_pool=True", "reward_model.n_gpus_per_node=8", "reward_model.nnodes=2"]


def served(*overrides: str) -> RewardModelConfig:
    model = resolved(*VLLM, *overrides).model
    assert model is not None
    return model


def test_verls_options_of_an_engine_reach_it() -> None:
    options = served(
        *POOL,
        "reward_model.rollout.tensor_model_parallel_size=4",
        "reward_model.rollout.gpu_memory_utilization=0.8",
        "reward_model.rollout.max_model_len=4096",
        "reward_model.rollout.max_num_seqs=64",
        "+reward_model.rollout.engine_kwargs.vllm.swap_space=0",
        "+reward_model.server.start_timeout_s=60",
    )
    assert (options.engine, options.placement, options.replicas) == ("vllm", "ray", 4)
    assert (options.tensor_parallel_size, options.gpu_memory_utilization, options.dtype) == (4, 0.8, "bfloat16")
    assert (options.max_model_len, options.start_timeout_s) == (4096, 60)
    assert (options.engine_args["max_num_seqs"], options.engine_args["swap_space"]) == (64, 0)


def test_verls_defaults_reach_vllm() -> None:
    options = served(*POOL)
    assert options.engine_args == {
        "enforce_eager": True,
        "load_format": "auto",
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 1024,
        "seed": 42,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        # Without it, requests that leave these fields out would get the defaults of the model.
        "override_generation_config": {"temperature": 1.0, "top_k": -1, "top_p": 1, "repetition_penalty": 1.0},
    }


def test_verls_sampling_options_are_defaults_of_vllm() -> None:
    rollout = "reward.reward_model.rollout"
    overrides = [f"{rollout}.temperature=0.2", f"{rollout}.top_p=0.5", "reward_model.rollout.response_length=64"]
    options = served(*POOL, *overrides)
    expected = {"temperature": 0.2, "top_k": -1, "top_p": 0.5, "repetition_penalty": 1.0, "max_new_tokens": 64}
    assert options.engine_args["override_generation_config"] == expected
    own = "+reward_model.rollout.engine_kwargs.vllm.override_generation_config={temperature:0.9}"
    options = served(*POOL, *overrides, own)
    assert options.engine_args["override_generation_config"] == {"temperature": 0.9}


def test_options_that_are_switched_off_reach_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    off = ["enforce_eager", "enable_prefix_caching", "enable_chunked_prefill"]
    overrides = [
        *(f"reward_model.rollout.{name}=False" for name in off),
        f"reward_model.model.path={tmp_path}",
        "reward_model.model.trust_remote_code=True",
    ]
    options = served(*POOL, *overrides)
    line = ENGINES["vllm"].command(served_models(options)[0], "127.0.0.1", 1)
    for name in off:
        assert f"--no-{name.replace('_', '-')}" in line
    assert "--trust-remote-code" in line


def test_engine_arguments_of_the_server_go_before_verls_and_keep_the_others() -> None:
    overrides = ["reward_model.rollout.max_num_seqs=64", "+reward_model.server.engine_args.max-num-seqs=8"]
    options = served(*POOL, *overrides, "+reward_model.server.engine_args.swap_space=0")
    assert options.engine_args["max_num_seqs"] == 8
    assert (options.engine_args["seed"], options.engine_args["swap_space"]) == (42, 0)


def test_sglang_gets_its_own_names() -> None:
    overrides = ["reward_model.rollout.name=sglang", "reward_model.rollout.max_num_seqs=64"]
    options = served(*POOL, *overrides)
    assert options.engine_args == {
        "disable_cuda_graph": True,
        "load_format": "auto",
        "max_running_requests": 64,
        "random_seed": 42,
    }


@pytest.mark.parametrize("flag", ["actor_rollout_ref.rollout", "+reward_model.rollout"])
def test_full_determinism_reaches_the_servers_of_judges(flag: str) -> None:
    own = "+reward_model.server.env.MINE=mine"
    options = served(*POOL, f"{flag}.full_determinism=True", own, "custom_reward_function.path=null")
    assert (options.env, options.engine_args["max_num_seqs"]) == ({"VLLM_BATCH_INVARIANT": "1", "MINE": "mine"}, 1)
    sglang = ["reward_model.rollout.name=sglang", "custom_reward_function.path=f.py"]
    options = served(*POOL, f"{flag}.full_determinism=True", *sglang)
    assert options.engine_args["enable_deterministic_inference"] is True
    assert options.engine_args["max_running_requests"] == 1024  # only `/classify` is not reproducible in batches


def test_on_a_cpu_vllm_needs_no_pool() -> None:
    options = served("trainer.device=cpu")
    assert (options.device, options.placement) == ("cpu", "local")


DEVICES = "+reward_model.server.env.CUDA_VISIBLE_DEVICES='6,7'"


def test_servers_beside_the_trainer_must_not_get_its_gpus_by_chance() -> None:
    local = "+reward_model.server.placement=local"
    other = "+reward_model.server.models.b={model_path: x, engine: sglang}"
    with pytest.raises(ConfigError, match=r"could get GPUs of the trainer.*\+reward_model\.server\.env\.CUDA_VISIBLE"):
        resolved(*VLLM, local)
    with pytest.raises(ConfigError, match=r"models\.b\.env\.CUDA_VISIBLE_DEVICES"):
        resolved(*VLLM, local, DEVICES, other)
    options = served(local, DEVICES)
    assert (options.placement, options.env) == ("local", {"CUDA_VISIBLE_DEVICES": "6,7"})
    assert resolved(*VLLM, local, "+reward_model.server.device=cpu").model is not None


def test_without_a_pool_the_model_shares_the_trainers_gpus() -> None:
    overrides = ["trainer.n_gpus_per_node=8", "trainer.nnodes=2", "reward_model.use_reward_loop=True"]
    of_the_router = ["+reward_model.server.log_dir=/logs", "+reward_model.server.policy=round_robin"]
    options = served(*overrides, *of_the_router)
    assert options.policy == "round_robin"
    assert (options.placement, options.tensor_parallel_size, options.replicas) == ("colocated", 2, 8)
    options = served(*overrides, "+reward_model.server.placement=local", DEVICES)
    assert (options.placement, options.replicas) == ("local", 1)
    in_pipeline = [PIPELINE, "trainer.v1.reward_pipeline.one_step_off_policy=False"]
    assert resolved(*VLLM, *overrides, *in_pipeline).model is not None


def test_one_model_on_the_trainers_gpus_may_be_beside_others_with_another_placement() -> None:
    models = {
        "small": "{model_path: /s, engine: vllm, placement: local, env: {CUDA_VISIBLE_DEVICES: '7'}}",
        "large": "{engine: external, urls: ['http://h:1'], kind: generative}",
    }
    overrides = [
        *(f"+reward_model.server.models.{name}={model}" for name, model in models.items()),
        "+reward_model.rollout.engine_kwargs.vllm.swap_space=1",
    ]
    settings, first = resolved(*VLLM, *overrides), served(*overrides)
    placements = {name: model.placement for name, model in first.models.items()}
    assert (first.placement, placements) == ("colocated", {"small": "local", "large": "local"})
    assert first.replicas == 4
    named, plain = verls_options(settings.config, "/m"), verls_options(settings.config)
    assert (plain.model_path, plain.rollout.tensor_model_parallel_size, plain.n_gpus_per_node) == ("/m", 2, 8)
    assert plain.rollout.engine_kwargs == {"vllm": {"swap_space": 1}}
    assert named.rollout.engine_kwargs == {"vllm": {"swap_space": 1, "served_model_name": "/m"}}


def test_data_parallel_attention_of_sglang_needs_no_more_gpus() -> None:
    sizes = ["reward_model.rollout.tensor_model_parallel_size=8", "reward_model.rollout.data_parallel_size=8"]
    sglang = [*VLLM[:2], "reward_model.rollout.name=sglang", VLLM[3], *sizes]
    options = resolved(*sglang, *POOL, "+reward_model.rollout.engine_kwargs.sglang.enable_dp_attention=True").model
    assert options is not None
    assert options.replicas == 2
    with pytest.raises(ConfigError, match=r"no room for a server of 64 GPU\(s\)"):
        resolved(*sglang, *POOL)


def test_external_servers_need_no_model_path() -> None:
    options = resolved(*EXTERNAL).model
    assert options is not None
    assert (options.model_path, options.urls) == (None, ("http://127.0.0.1:1",))


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
    model = ["reward_model.enable=True", "reward_model.model.path=/m", "reward_model.rollout.name=transformers"]
    assert resolved(*model, *overrides).scores_by_model is by_model
    assert not resolved(*overrides).scores_by_model


MODEL = "reward_model.enable=True reward_model.model.path=/m"
FUNCTION = "custom_reward_function.path=f.py"
JUDGE = "+reward_model.server.models.j"

WRONG = {
    f"reward_model.enable=True {FUNCTION}": "reward.reward_model.model_path",
    f"{MODEL} reward_model.rollout.name=transformers reward_model.reward_manager=dapo": "manager=dapo .* needs a",
    f"{MODEL} reward_model.rollout.name=nonesuch {FUNCTION}": "reward_model.server.engine.*nonesuch",
    f"{MODEL} {FUNCTION}": "reward_model.rollout.name",
    "VLLM trainer.n_gpus_per_node=1": "the trainer's GPUs: nnodes=1 with n_gpus_per_node=1 .*2 GPU",
    "VLLM +reward_model.server.replicas=5": "reward_model.server.replicas has no effect.*OWN_GPUS",
    "VLLM reward_model.model.trust_remote_code=True": "model.trust_remote_code has no effect.*OWN_GPUS",
    f"VLLM {JUDGE}.model_path=/j": "only the first model can be on .*j.placement=ray.*engine=external",
    f"VLLM POOL {JUDGE}={{model_path:/j,placement:colocated}}": "models.j: only the first model can",
    "VLLM trainer.v1.trainer_mode=separate_async": "trainer_mode=separate_async.*OWN_GPUS",
    f"VLLM {PIPELINE}": "one_step_off_policy=True.*OWN_GPUS",
    "VLLM algorithm.filter_groups.enable=True": "algorithm.filter_groups.enable=True.*OWN_GPUS",
    "VLLM reward_model.enable_resource_pool=True": "reward_model.n_gpus_per_node=4 trainer.n_gpus_per_node=4",
    "VLLM POOL +reward_model.server.replicas=2": "reward_model.server.replicas contradicts",
    "VLLM POOL +reward_loop.models.j={timeout:4}": "reward_loop.models: the run serves its models",
    "WITHOUT_A_FUNCTION": "custom_reward_function.path.*reward.reward_model.model_path",
    "VLLM POOL reward_model.rollout.tensor_model_parallel_size=16": "a server of 16 GPU.*on one node.*not supported",
    "VLLM reward_model.model.path=hdfs://c/judge": "model_path=hdfs://c/judge.*a directory that all nodes have",
    "VLLM POOL +reward_model.rollout.engine_kwargs.sglang.x=1": r"engine_kwargs.sglang.*vllm.\*",
}
"""Options -> what the error says."""
SETS = {"VLLM": VLLM, "POOL": POOL, "WITHOUT_A_FUNCTION": EXTERNAL[:-1]}


@pytest.mark.parametrize("overrides", WRONG)
def test_options_without_effect_are_errors_that_name_them(overrides: str) -> None:
    said = WRONG[overrides].replace("OWN_GPUS", "the trainer's GPUs.*reward_model.enable_resource_pool=True")
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        resolved(*(option for word in overrides.split() for option in SETS.get(word, [word])))
