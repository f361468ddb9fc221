"""The options of reward models and their servers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from reward_loop.config import Config
from reward_loop.errors import ConfigError
from reward_loop.router.config import PolicyName, SharedRouterOptions


class ServedModelConfig(Config):
    """A model, and its servers."""

    model_path: str | None = None
    """A model directory in the format of transformers' ``save_pretrained``, or the name of a model of the Hugging Face
    hub, which is downloaded if it is not in the cache. Required by every engine except ``external``."""

    served_model_name: str | None = None
    """The ``model`` in requests. By default `model_path`, as in vLLM."""

    engine: Literal["vllm", "sglang", "transformers", "external"] = "transformers"
    """The program that runs the model. ``transformers`` is the embedded server: on the CPU, in float32, for small
    models. ``external`` starts nothing: `urls` are servers that already run."""

    python: str | None = None
    """For vLLM and SGLang: the Python interpreter that runs the engine, such as ``/envs/sglang/bin/python``, if the
    engine has its own environment. Every node with servers needs it at the same path. By default the interpreter of
    this library."""

    kind: Literal["auto", "generative", "discriminative"] = "auto"
    """Whether the model generates text or returns logits; ``auto`` reads it from the model's ``config.json``."""

    urls: tuple[str, ...] = ()
    """For ``external``: the servers, each as ``http://host:port``."""

    replicas: int = Field(default=1, ge=1)
    """The number of servers, which share the load."""

    device: Literal["gpu", "cpu"] = "gpu"
    """For vLLM and SGLang: where the model runs. ``cpu`` needs builds of the engines for the CPU; servers get no GPU. A
    model of `models` has by default that of the model outside of it, which in a verl run is ``trainer.device``."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """For vLLM and SGLang: the number of GPUs over which each copy of the model is split."""

    data_parallel_size: int = Field(default=1, ge=1)
    """For vLLM and SGLang: the number of copies of the model in each server."""

    trust_remote_code: bool = False
    """For vLLM and SGLang: run the Python code that the model's directory contains."""

    dtype: str = "auto"
    """For vLLM and SGLang: the precision, such as ``bfloat16`` or ``float32``; ``auto`` is the precision of the
    checkpoint."""

    max_model_len: int | None = Field(default=None, ge=1)
    """For vLLM and SGLang: the largest number of tokens of a prompt and its answer. By default the value in the model's
    ``config.json``."""

    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """For vLLM and SGLang: the share of each GPU's memory that a server may use. By default the engine's own value."""

    engine_args: dict[str, Any] = Field(default_factory=dict)
    """More options of the engine's command line, such as ``max_num_seqs: 64`` for ``--max-num-seqs 64``. ``true``
    stands for a flag without a value, ``false`` or ``null`` omits an option, mappings are passed as JSON."""

    max_batch_size: int = Field(default=64, ge=1)
    """For ``transformers``: the largest number of requests in one batch."""

    threads: int = Field(default=1, ge=1)
    """CPU threads of each server that runs on the CPU."""

    start_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds within which a server must be ready, including the download of its model. A server whose process ends
    fails at once."""

    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables for the servers."""

    max_concurrent: int | None = Field(default=None, ge=1)
    """In a verl run: the largest number of requests of `reward_loop.client` to this model that are in flight, of all
    workers together. A request with a limit of its own (``Judge(limit=...)``) does not count. By default, only
    ``reward_loop.limits.reward_model`` limits them, which applies to calls of the function that ask any model."""

    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """In a verl run: seconds until a request of `reward_loop.client` to this model is answered, unless the function
    gives another ``timeout``; at most ``reward_loop.timeout``. By default 300."""

    placement: Literal["local", "ray", "colocated"] = "local"
    """Where the servers run; a model of `models` has by default that of the model outside of it. ``local``: as
    processes of this machine. ``ray``: in Ray actors that reserve their GPUs, on any node. ``colocated``, only in a
    verl run: on the trainer's GPUs, awake only while the rollout sleeps."""


class RewardModelConfig(SharedRouterOptions, ServedModelConfig):
    """Reward models, their servers, and the router in front of them."""

    models: dict[str, ServedModelConfig] = Field(default_factory=dict)
    """More models behind the same router, by the name that requests use."""

    placement_timeout_s: float = Field(default=300.0, gt=0)
    """For the placement ``ray``: seconds within which Ray must find room for all servers."""

    starts_at_a_time: int = Field(default=2, ge=1)
    """The largest number of servers that start at the same time: each reads the whole model from disk."""

    host: str = "127.0.0.1"
    """The address on which the router listens, and which `reward_router_address` contains. In a verl run on several
    nodes, by default that of its node."""

    router_port: int | None = Field(default=None, ge=1, le=65535)
    """The router's port. By default any free port."""

    policy: PolicyName = "affinity"
    """Which of a model's servers gets a request. ``affinity``: the same one for all requests of a generative judge on
    the responses to a prompt, so that the server computes their common beginning once; if it has far more requests in
    flight than the others, another one. ``least_in_flight``, ``round_robin``: regardless of the content."""

    log_dir: str | None = None
    """The directory of the logs of servers and router. By default a new temporary directory, which
    stays. Servers in Ray on another node write to the same path there."""

    def requests(self) -> dict[str, dict[str, Any]]:
        """Return the limit and the deadline of requests to each model that has one, for `RewardLoopConfig.models`.

        Raises:
            ConfigError: the model outside of `models` has one, but no name.
        """
        first = self.served_model_name or (None if self.engine == "external" else self.model_path)
        requests = {}
        for name, model in ((first, self), *self.models.items()):
            if model.max_concurrent is None and model.timeout is None:
                continue
            if name is None:
                raise ConfigError("max_concurrent and timeout need the name that requests use: set served_model_name")
            requests[name] = model.model_dump(include={"max_concurrent", "timeout"})
        return requests

    @model_validator(mode="after")
    def _place_models(self) -> RewardModelConfig:
        for name, model in self.models.items():
            if model.engine != "external":
                shared = {"placement": self.placement, "device": self.device}
                own = model.model_dump(include=model.model_fields_set & shared.keys())
                self.models[name] = model.model_copy(update=shared | own)
        return self

    @field_validator("host")
    @classmethod
    def _is_no_wildcard(cls, host: str) -> str:
        if host in ("", "0.0.0.0", "::"):
            raise ValueError("it must be the address that clients connect to, not a wildcard")
        return host
