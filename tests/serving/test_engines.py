"""What the engines are started with, which GPUs they get, and which configurations are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reward_loop.config import RewardModelConfig, ServedModelConfig, parse
from reward_loop.errors import ConfigError
from reward_loop.serving import engines
from reward_loop.serving.engines import ENGINES
from reward_loop.serving.gpus import GpuShares
from reward_loop.serving.models import requests_at_a_time, served_models


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says which vLLM is installed."""

    def say(version: str | None) -> None:
        monkeypatch.setattr(engines, "version", lambda *_: version)

    return say


def settled(engine: Any, **options: Any) -> ServedModelConfig:
    given = {"model_path": "/m", "served_model_name": "judge", "kind": "generative"} | options
    return ServedModelConfig(engine=engine, **given)


def command(model: ServedModelConfig) -> str:
    return " ".join(ENGINES[model.engine].command(model, "127.0.0.1", 8001)).removeprefix(sys.executable)


def test_vllm_on_gpus(installed: Any) -> None:
    installed("0.31.0")
    model = settled(
        "vllm",
        tensor_parallel_size=4,
        data_parallel_size=2,
        gpu_memory_utilization=0.8,
        engine_args={
            "max-num-seqs": 64,
            "enforce_eager": True,
            "quantization": None,
            "async_scheduling": False,
            "hf_overrides": {"a": [1]},
            "lora_modules": ["x=/x", "y=/y"],
        },
    )
    assert command(model) == (
        " -m vllm.entrypoints.cli.main serve /m --host 127.0.0.1 --port 8001 --served-model-name judge "
        "--disable-uvicorn-access-log --dtype auto --gpu-memory-utilization 0.8 --tensor-parallel-size 4 "
        "--data-parallel-size 2 "
        '--max-num-seqs 64 --enforce-eager --hf-overrides {"a": [1]} --lora-modules x=/x y=/y'
    )
    environment = ENGINES["vllm"].environment(model)
    assert "TORCHDYNAMO_DISABLE" not in environment
    assert ENGINES["vllm"].gpus(model) == 8


def test_vllm_on_a_cpu(installed: Any) -> None:
    installed("0.31.0+cpu")
    model = settled("vllm", kind="discriminative", dtype="float32", env={"OMP_NUM_THREADS": "7"})
    assert command(model).endswith(
        "--dtype float32 --tensor-parallel-size 1 --data-parallel-size 1 --runner pooling --convert classify "
        "--enforce-eager --kv-cache-memory-bytes 1G"
    )
    environment = ENGINES["vllm"].environment(model)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["OMP_NUM_THREADS"] == "7"
    assert ENGINES["vllm"].gpus(model) == 0


def test_engine_args_override_the_librarys_flags(installed: Any) -> None:
    installed("0.31.0+cpu")
    model = settled("vllm", engine_args={"kv_cache_memory_bytes": "32M", "dtype": "bfloat16", "enforce_eager": False})
    assert command(model).endswith(
        "--disable-uvicorn-access-log --dtype bfloat16 --tensor-parallel-size 1 --data-parallel-size 1 "
        "--kv-cache-memory-bytes 32M"
    )


def test_sglang() -> None:
    model = settled(
        "sglang", kind="discriminative", tensor_parallel_size=2, max_model_len=4096, gpu_memory_utilization=0.7
    )
    assert command(model) == (
        " -m sglang.launch_server --model-path /m --host 127.0.0.1 --port 8001 --served-model-name judge --dtype auto "
        "--context-length 4096 --mem-fraction-static 0.7 --is-embedding --tp-size 2 --dp-size 1"
    )
    assert ENGINES["sglang"].gpus(model) == 2


def test_sglang_on_a_cpu_takes_no_gpus() -> None:
    assert ENGINES["sglang"].gpus(settled("sglang", engine_args={"device": "cpu"})) == 0
    assert ENGINES["sglang"].gpus(settled("sglang", engine_args={"--device": "cpu"}, tensor_parallel_size=2)) == 0
    assert ENGINES["sglang"].gpus(settled("sglang", engine_args={"device": "cuda"})) == 1
    assert ENGINES["sglang"].gpus(settled("sglang", env={"SGLANG_USE_CPU_ENGINE": "1"})) == 0


def test_sglang_on_a_cpu_needs_no_other_option() -> None:
    model = settled("sglang", engine_args={"device": "cpu"}, threads=3)
    assert command(model).endswith(
        " --served-model-name judge --dtype auto --tp-size 1 --dp-size 1 --device cpu --disable-overlap-schedule"
        " --disable-cuda-graph --sleep-on-idle"
    )
    environment = ENGINES["sglang"].environment(model)
    assert (environment["SGLANG_USE_CPU_ENGINE"], environment["OMP_NUM_THREADS"]) == ("1", "3")
    on_gpus = ENGINES["sglang"].environment(settled("sglang"))
    assert "SGLANG_USE_CPU_ENGINE" not in on_gpus
    assert "OMP_NUM_THREADS" not in on_gpus


def test_trust_remote_code_is_passed_on_only_if_set(installed: Any) -> None:
    installed("0.31.0")
    for engine in ("vllm", "sglang"):
        assert "--trust-remote-code" in command(settled(engine, trust_remote_code=True))
        assert "--trust-remote-code" not in command(settled(engine))


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForSequenceClassification"]}')
    return str(tmp_path)


def test_several_models(model_dir: str) -> None:
    config = parse(
        RewardModelConfig,
        {
            "model_path": model_dir,
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
    assert (third.served_model_name, third.kind, third.urls) == ("judge", "generative", ("http://10.0.0.1:8000",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "^model_path: required"),
        ({"models": {"a": {}}}, r"^models\.a\.model_path: required"),
        ({"model_path": "/no/such"}, "^model_path: there is no directory"),
        ({"model_path": "hdfs://a/b"}, "^model_path=hdfs://a/b: .* a directory that all nodes have"),
        ({"model_path": "DIR", "trust_remote_code": True}, "trust_remote_code has no effect with engine='transf"),
        ({"model_path": "DIR", "kind": "generative"}, "kind='generative': the model in .* is discriminative"),
        ({"engine": "external"}, "^urls: engine='external' needs"),
        ({"engine": "external", "urls": ("10.0.0.1:8000",)}, r"^urls\.url: .*expected http://host:port"),
        ({"model_path": "DIR", "urls": ("http://a:1",)}, "^urls: valid only for engine='external'"),
        ({"model_path": "DIR", "tensor_parallel_size": 2}, "tensor_parallel_size has no effect with engine='transf"),
        ({"model_path": "DIR", "engine": "vllm"}, "engine='vllm': vLLM is not installed"),
        ({"models": {"a": {"model_path": "DIR", "engine": "sglang"}}}, r"^models\.a\.engine='sglang': SGLang is not"),
        (
            {"model_path": "DIR", "served_model_name": "a", "models": {"a": {"model_path": "DIR"}}},
            "two models have the name 'a'",
        ),
        ({"models": {"a": {"model_path": "DIR", "served_model_name": "b"}}}, "the model already has the name 'a'"),
    ],
)
def test_a_wrong_configuration_is_refused(
    options: dict[str, Any], message: str, model_dir: str, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(None)
    monkeypatch.setattr(engines, "has_module", lambda *_: False)

    def put(value: Any) -> Any:
        return (
            {k: put(v) for k, v in value.items()} if isinstance(value, dict) else model_dir if value == "DIR" else value
        )

    with pytest.raises(ConfigError, match=message):
        served_models(parse(RewardModelConfig, put(options), "reward_model"))


def test_an_option_that_is_ours_is_refused_as_an_engine_argument(model_dir: str, installed: Any) -> None:
    installed("0.31.0")
    with pytest.raises(ConfigError, match=r"^engine_args\.port: is set by reward_loop"):
        served_models(RewardModelConfig(model_path=model_dir, engine="vllm", engine_args={"--port": 1}))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("option", ["--tensor-parallel-size", "dp_size", "tp", "pipeline_parallel_size"])
def test_an_engine_argument_cannot_change_the_number_of_gpus(engine: str, option: str, installed: Any) -> None:
    installed("0.31.0")
    with pytest.raises(ConfigError, match=r"^engine_args\.\w+: set tensor_parallel_size or data_parallel_size"):
        command(settled(engine, engine_args={option: 2}))


def test_data_parallel_attention_of_sglang_shares_the_gpus_of_tensor_parallelism() -> None:
    sizes = {"tensor_parallel_size": 8, "data_parallel_size": 8}
    model = settled("sglang", engine_args={"--enable-dp-attention": True}, **sizes)
    assert ENGINES["sglang"].gpus(model) == 8
    assert command(model).endswith("--tp-size 8 --dp-size 8 --enable-dp-attention")
    assert ENGINES["sglang"].gpus(settled("sglang", **sizes)) == 64


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_started_by_a_rank_of_torchrun_has_a_rendezvous_of_its_own(
    engine: str, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("0.31.0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    environment = ENGINES[engine].environment(settled(engine))
    assert environment["TORCHELASTIC_USE_AGENT_STORE"] == "False"  # torch compares it with the word "True"


def visible(devices: str) -> dict[str, str]:
    # On AMD GPUs, vLLM does not start if the two differ.
    return {"CUDA_VISIBLE_DEVICES": devices, "HIP_VISIBLE_DEVICES": devices}


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_each_server_gets_gpus_of_its_own(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(variable, "4,5,6,7")
    shares = GpuShares()
    assert shares.share(2, 1, {}, "a") == [visible("4,5")]
    assert shares.share(0, 2, {}, "b") == [{}, {}]
    assert shares.share(1, 2, {}, "c") == [visible("6"), visible("7")]
    assert shares.share(1, 1, {variable: "4"}, "d") == [visible("4")]
    with pytest.raises(ConfigError, match=r"model 'e': 1 server\(s\) with 1 GPU\(s\) each need 1, and 0 are free"):
        shares.share(1, 1, {}, "e")


def test_each_server_gets_npus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1,2,3")
    shares = GpuShares()
    assert shares.share(2, 1, {}, "a") == [{"ASCEND_RT_VISIBLE_DEVICES": "0,1"}]
    assert shares.share(1, 1, {}, "b") == [{"ASCEND_RT_VISIBLE_DEVICES": "2"}]


def test_without_gpus_none_is_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    with pytest.raises(ConfigError, match=r"0 are free here: .* HIP_VISIBLE_DEVICES .* ASCEND_RT_VISIBLE_DEVICES"):
        GpuShares().share(1, 1, {}, "a")


def test_what_servers_compute_at_a_time() -> None:
    def at_a_time(**options: Any) -> int | None:
        return requests_at_a_time(RewardModelConfig(model_path="/m", **options))

    assert at_a_time(engine="transformers", max_batch_size=5, replicas=3) == 15
    assert at_a_time(engine="vllm", replicas=2, data_parallel_size=2) == 4 * 256
    assert at_a_time(engine="vllm", engine_args={"--max-num-seqs": 32}) == 32
    assert at_a_time(engine="vllm", engine_args={"max_num_seqs": 1024}) == 256
    assert at_a_time(engine="sglang", engine_args={"max_running_requests": "48"}, tensor_parallel_size=2) == 48
    more = {"small": ServedModelConfig(model_path="/n", max_batch_size=4)}
    assert at_a_time(max_batch_size=2, models=more) == 6
    assert requests_at_a_time(RewardModelConfig(models=more)) == 4
    assert requests_at_a_time(RewardModelConfig(engine="external", urls=("http://h:1",))) is None
