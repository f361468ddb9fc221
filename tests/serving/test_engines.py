"""What the engines are started with, which GPUs they get, and which configurations are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reward_loop.config import RewardModelConfig, ServedModelConfig, parse
from reward_loop.errors import ConfigError
from reward_loop.serving.engines import ENGINES
from reward_loop.serving.models import served_models
from reward_loop.serving.server_spec import GpuShares


def settled(engine: Any, **options: Any) -> ServedModelConfig:
    given = {"model_path": "/m", "served_model_name": "judge", "kind": "generative"} | options
    return ServedModelConfig(engine=engine, **given)


def command(model: ServedModelConfig) -> str:
    return " ".join(ENGINES[model.engine].command(model, "127.0.0.1", 8001)).removeprefix(sys.executable)


VLLM = " -m vllm.entrypoints.cli.main serve /m --host 127.0.0.1 --port 8001 --served-model-name judge"
SGLANG = " -m sglang.launch_server --model-path /m --host 127.0.0.1 --port 8001 --served-model-name judge"
ARGUMENTS = {
    "max-num-seqs": 64,
    "enforce_eager": True,
    "quantization": None,
    "async_scheduling": False,
    "hf_overrides": {"a": [1]},
    "lora_modules": ["x=/x", "y=/y"],
}


@pytest.mark.parametrize(
    ("engine", "options", "line"),
    [
        (
            "vllm",
            {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.8, "engine_args": ARGUMENTS},
            f"{VLLM} --disable-uvicorn-access-log --dtype auto --gpu-memory-utilization 0.8 --tensor-parallel-size 4 "
            "--data-parallel-size 1 --max-num-seqs 64 --enforce-eager "
            '--hf-overrides {"a": [1]} --lora-modules x=/x y=/y',
        ),
        (
            "vllm-cpu",
            {"kind": "discriminative", "dtype": "float32", "trust_remote_code": True},
            f"{VLLM} --disable-uvicorn-access-log --dtype float32 --trust-remote-code --tensor-parallel-size 1 "
            "--data-parallel-size 1 --runner pooling --convert classify --enforce-eager --kv-cache-memory-bytes 1G",
        ),
        (  # `engine_args` override the library's flags
            "vllm-cpu",
            {"engine_args": {"kv_cache_memory_bytes": "32M", "dtype": "bfloat16", "enforce_eager": False}},
            f"{VLLM} --disable-uvicorn-access-log --dtype bfloat16 --tensor-parallel-size 1 --data-parallel-size 1 "
            "--kv-cache-memory-bytes 32M",
        ),
        (
            "sglang",
            {"kind": "discriminative", "max_model_len": 4096, "gpu_memory_utilization": 0.7},
            f"{SGLANG} --dtype auto --context-length 4096 --mem-fraction-static 0.7 --is-embedding --tp-size 1 "
            "--dp-size 1",
        ),
        (
            "sglang-cpu",
            {"trust_remote_code": True},
            f"{SGLANG} --dtype auto --trust-remote-code --tp-size 1 --dp-size 1 --device cpu "
            "--disable-overlap-schedule --disable-cuda-graph --sleep-on-idle",
        ),
    ],
)
def test_the_command_line(engine: str, options: dict[str, Any], line: str) -> None:
    name, _, device = engine.partition("-")
    assert command(settled(name, device=device or "gpu", **options)) == line


@pytest.mark.parametrize(
    ("engine", "options", "gpus"),
    [
        ("vllm", {"tensor_parallel_size": 4, "data_parallel_size": 2}, 8),
        ("sglang", {"device": "cpu", "tensor_parallel_size": 2}, 0),
        ("vllm", {"device": "cpu"}, 0),
        ("sglang", {}, 1),
        ("sglang", {"tensor_parallel_size": 8, "data_parallel_size": 8}, 64),
        # Data-parallel attention shares the GPUs of tensor parallelism.
        (
            "sglang",
            {"tensor_parallel_size": 8, "data_parallel_size": 8, "engine_args": {"enable-dp-attention": True}},
            8,
        ),
    ],
)
def test_the_number_of_gpus(engine: str, options: dict[str, Any], gpus: int) -> None:
    assert ENGINES[engine].gpus(settled(engine, **options)) == gpus


def test_the_environment_of_engines_on_a_cpu() -> None:
    vllm = settled("vllm", device="cpu", env={"OMP_NUM_THREADS": "7"})
    environment = ENGINES["vllm"].environment(vllm)
    assert (environment["VLLM_CPU_OMP_THREADS_BIND"], environment["OMP_NUM_THREADS"]) == ("nobind", "7")
    environment = ENGINES["sglang"].environment(settled("sglang", device="cpu", threads=3))
    assert (environment["SGLANG_USE_CPU_ENGINE"], environment["OMP_NUM_THREADS"]) == ("1", "3")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_environment_of_engines_on_gpus(engine: str) -> None:
    environment = ENGINES[engine].environment(settled(engine))
    assert not {"SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"} & environment.keys()
    # A rank of torchrun sets it to True. torch compares it with the word "True".
    assert environment["TORCHELASTIC_USE_AGENT_STORE"] == "False"


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForSequenceClassification"]}')
    return str(tmp_path)


def test_the_engine_runs_in_the_interpreter_of_the_option(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def python_of(option: str, engine: Any) -> str:
        [model] = served_models(RewardModelConfig(model_path=model_dir, engine=engine, python=option))
        return ENGINES[engine].command(model, "127.0.0.1", 1)[0]

    monkeypatch.chdir(tmp_path)
    for engine in ("sglang", "vllm"):
        assert python_of("./env/bin/python", engine) == str(tmp_path / "env/bin/python")
        assert python_of("python", engine) == "python"  # looked up in PATH


def test_several_models(model_dir: str) -> None:
    config = parse(
        RewardModelConfig,
        {
            "model_path": model_dir,
            "device": "cpu",
            "models": {
                "scorer": {"model_path": model_dir, "replicas": 2},
                "judge": {"engine": "external", "urls": ["http://10.0.0.1:8000"], "kind": "generative"},
            },
        },
        "reward_model.server",
    )
    first, second, third = served_models(config)
    assert (first.served_model_name, first.kind, first.replicas) == (model_dir, "discriminative", 1)
    assert (second.served_model_name, second.kind, second.replicas) == ("scorer", "discriminative", 2)
    assert [model.device for model in (first, second)] == ["cpu", "cpu"]
    assert (third.served_model_name, third.kind, third.urls) == ("judge", "generative", ("http://10.0.0.1:8000",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "^model_path: required"),
        ({"models": {"a": {}}}, r"^models\.a\.model_path: required"),
        ({"model_path": "/no/such"}, "^model_path: the directory '/no/such' does not exist"),
        ({"model_path": "hdfs://a/b"}, "^model_path=hdfs://a/b: .* a directory that all nodes have"),
        ({"model_path": "DIR", "kind": "generative"}, "kind='generative': the model in .* is discriminative"),
        ({"engine": "external"}, "^urls: engine='external' needs"),
        ({"engine": "external", "urls": ("10.0.0.1:8000",)}, r"^urls\.url: .*expected http://host:port"),
        ({"model_path": "DIR", "urls": ("http://a:1",)}, "^urls: valid only for engine='external'"),
        (
            {"models": {"a": {"model_path": "DIR", "engine": "sglang", "engine_args": {"device": "cpu"}}}},
            r"^models\.a\.engine_args\.device: is set by reward_loop, from its own options",
        ),
        (
            {"model_path": "DIR", "served_model_name": "a", "models": {"a": {"model_path": "DIR"}}},
            "two models have the name 'a'",
        ),
        ({"models": {"a": {"model_path": "DIR", "served_model_name": "b"}}}, "the model already has the name 'a'"),
    ],
)
def test_a_wrong_configuration_is_refused(options: dict[str, Any], message: str, model_dir: str) -> None:
    given = json.loads(json.dumps(options).replace("DIR", model_dir))
    with pytest.raises(ConfigError, match=message):
        served_models(parse(RewardModelConfig, given, "reward_model"))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--port", r"^engine_args\.port: is set by reward_loop"),
        ("--tensor-parallel-size", r"^engine_args\.\w+: set tensor_parallel_size or data_parallel_size"),
        ("dp", r"^engine_args\.dp: set tensor_parallel_size or data_parallel_size"),
        ("pipeline_parallel_size", r"^engine_args\.\w+: set tensor_parallel_size or data_parallel_size"),
    ],
)
def test_options_that_the_library_sets_are_refused_as_engine_arguments(engine: str, option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command(settled(engine, engine_args={option: 2}))


def test_each_server_gets_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")

    def visible(devices: str) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": devices}

    shares = GpuShares()
    assert shares.share(2, 1, {}, "a") == [visible("4,5")]
    assert shares.share(0, 2, {}, "b") == [{}, {}]
    assert shares.share(1, 2, {}, "c") == [visible("6"), visible("7")]
    assert shares.share(1, 1, visible("4"), "d") == [visible("4")]
    assert shares.share(1, 2, visible("4,4"), "d") == [visible("4")] * 2, "two servers of a model on one GPU"
    with pytest.raises(ConfigError, match=r"model 'e': 1 server\(s\) with 1 GPU\(s\) each need 1, and 0 are free"):
        shares.share(1, 1, {}, "e")


def test_servers_ask_for_a_key() -> None:
    asks = {name: engine.with_key("secret") for name, engine in ENGINES.items()}
    assert asks == {
        "vllm": ([], {"VLLM_API_KEY": "secret"}),
        "sglang": (["--api-key", "secret"], {}),
        "transformers": ([], {"REWARD_LOOP_SERVER_KEY": "secret"}),
    }


def test_without_gpus_none_is_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    with pytest.raises(ConfigError, match=r"0 are free here: .* set CUDA_VISIBLE_DEVICES to the devices"):
        GpuShares().share(1, 1, {}, "a")
