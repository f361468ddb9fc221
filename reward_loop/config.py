"""The options, each with its meaning and default. Unknown keys are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from reward_loop._util.text import did_you_mean, listing, shorten
from reward_loop.errors import ConfigError
from reward_loop.types import Policy

__all__ = [
    "BatchConfig",
    "BudgetConfig",
    "CacheConfig",
    "ComponentConfig",
    "Config",
    "GroupConfig",
    "LimitConfig",
    "Policy",
    "RetryConfig",
    "RewardLoopConfig",
    "RewardModelConfig",
    "ServedModelConfig",
    "parse",
]


class Config(BaseModel):
    """Base of all option groups: immutable, and a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class LimitConfig(Config):
    """What one service takes, from all workers of a job together."""

    max_concurrent: int | None = Field(default=None, ge=1)
    """Calls at a time."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    """Calls that begin in any 60 seconds."""

    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of the calls that begin in any 60 seconds: first as estimated, then as used."""

    burst_seconds: float = Field(default=1.0, gt=0, le=60)
    """Pacing: calls and tokens worth this many seconds of the limits above may begin at once, at least one call. ``60``
    lets a whole minute's worth begin at once."""

    estimated_tokens_per_request: float = Field(default=0, ge=0)
    """Tokens that a call counts with if it gives no estimate of its own."""

    adaptive: bool = False
    """Find the concurrency: it grows up to `max_concurrent` as the service answers calls, and shrinks when the service
    answers 429. Timeouts and other errors do not change it."""

    max_wait: float | None = Field(default=3600.0, gt=0)
    """Seconds that a call may wait for its turn before it fails; ``None`` for any time."""


class RetryConfig(Config):
    """When a call that failed is made again."""

    max_attempts: int = Field(default=3, ge=1)
    """How often the function is called for a sample at most, where it fails in a way that may pass: a connection that
    breaks, a timeout of the client, HTTP 408, 409, 425, 429 and 5xx. Other errors are never tried again; 1 tries
    nothing again."""

    max_seconds: float = Field(default=600.0, gt=0)
    """No attempt begins later than this many seconds after the first; time spent waiting for limits counts."""

    initial_wait: float = Field(default=0.5, ge=0)
    """Seconds of the first pause, which doubles each time; each pause is drawn between nothing and that."""

    max_wait: float = Field(default=60.0, ge=0)
    """The longest pause in seconds. A ``Retry-After`` of the service is obeyed, even if it is longer."""


class CacheConfig(Config):
    """Whether equal calls are made once."""

    enabled: bool = False
    """Merge equal calls in flight into one. Leave it off for judges that answer the same question differently each
    time."""

    path: str | None = None
    """A file (SQLite) that stores scores for later calls and runs; several processes can share it."""

    version: str = ""
    """Any text; stored scores are used only with the same version. Change it when the score depends on something that
    is neither in the function's file nor in its arguments, such as the judge's model. With ``path``, required for a
    function that is not defined at the top level of a file."""


class BudgetConfig(Config):
    """What the calls of a run may use, in all workers together: requests of `reward_loop.client` count by themselves,
    others by ``lease.used``."""

    max_cost: float | None = Field(default=None, gt=0)
    """In the unit in which the function reports its costs."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens: those of `reward_loop.client`, and those that the function reports."""

    at_cap: Literal["stop", "default", "mask"] = "stop"
    """What becomes of samples once it is used up: ``stop`` ends the run; with ``default`` and ``mask`` the function is
    not called any more, and the samples have the default score, or are left out of training."""


class BatchConfig(Config):
    """How the manager ``batch`` collects samples."""

    max_batch_size: int = Field(default=64, ge=1)
    """How many samples one call of the function has, at most."""

    max_wait_ms: float = Field(default=10.0, ge=0)
    """How many milliseconds a sample waits for others to share its call, at most."""


class GroupConfig(Config):
    """How the manager ``group`` collects the samples of a prompt."""

    size: int | None = Field(default=None, ge=1)
    """How many samples a group has, where they do not say it themselves; by default verl's
    ``actor_rollout_ref.rollout.n``."""

    timeout: float = Field(default=600.0, gt=0)
    """Seconds from the first sample of a group to its last; after them, a group that is not complete fails. The slowest
    rollout of a prompt must fit in."""


class ComponentConfig(Config):
    """One of the rewards of the manager ``composite``."""

    path: str | None = None
    """The function, as in ``custom_reward_function``: a file, ``pkg://module``, or ``reward.py:accuracy``. By default
    the one function that the run has besides: ``custom_reward_function``, or verl's own by data source."""

    name: str | None = None
    """What to take from `path`, where that does not say; ``compute_score`` if neither does."""

    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function, or of its class."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """What its score is multiplied with before scores are added."""

    gate: float | None = Field(default=None, allow_inf_nan=False)
    """With a number, the components after this one are called, and count, only if its score is at least that."""

    timeout: float | None = Field(default=None, gt=0)
    """Seconds from the start of the function to its deadline; by default as in the run's options, as for all below."""

    max_threads: int | None = Field(default=None, ge=1)
    """How many of its calls run at a time in threads."""

    isolation: Literal["thread", "process"] | None = None
    """Where it runs, if it is sync."""

    max_processes: int | None = Field(default=None, ge=1)
    """How many of its calls run at a time in processes."""

    max_memory_mb: int | None = Field(default=None, ge=16)
    """Megabytes that such a process may use."""

    limit: str = "default"
    """Which of ``reward_loop.limits`` holds for its calls."""

    retry: RetryConfig | None = None
    """When its calls are made again: the options of ``reward_loop.retry``; those not given are the run's."""

    cache: CacheConfig | None = None
    """Whether its equal calls are made once: the options of ``reward_loop.cache``; likewise."""

    on_failed: Policy | None = None
    """Where this function fails: ``raise`` stops the run, ``default`` counts `default_score` as its score, ``mask``
    leaves the sample out of training."""

    on_unscored: Policy | None = None
    """The same choice where this function returns ``None``."""

    default_score: float | None = Field(default=None, allow_inf_nan=False)
    """Its score under the policy ``default``."""


class RewardLoopConfig(Config):
    """How samples are scored, and what becomes of those without a score."""

    on_failed: Policy = "mask"
    """For samples whose function raised, timed out or returned no score: ``raise`` stops the run, ``default`` gives
    them `default_score`, ``mask`` marks them ``reward_masked`` so that training leaves them out."""

    on_unscored: Policy = "mask"
    """The same choice for samples whose function returned ``None``."""

    default_score: float = Field(default=0.0, allow_inf_nan=False)
    """The score under the policy ``default``."""

    timeout: float | None = Field(default=300.0, gt=0)
    """Seconds from the start of the function to its deadline; ``None`` for no deadline."""

    max_threads: int = Field(default=64, ge=1)
    """How many calls of a sync function run at a time."""

    isolation: Literal["thread", "process"] = "thread"
    """Where sync functions run: in threads, which cannot be killed, or in processes, which can. A function marked with
    ``isolated`` runs in processes in any case."""

    max_processes: int | None = Field(default=None, ge=1)
    """How many calls of a sync function run at a time in processes; by default as many as there are cores, which the
    reward workers of a verl run share."""

    max_memory_mb: int | None = Field(default=None, ge=16)
    """Megabytes (2^20 bytes) that such a process may use, with all that it started; one that passes them is killed, and
    its sample fails. By default, there is no bound."""

    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """The run stops when more than this share of the latest samples failed; 1 never stops it."""

    min_samples_for_failed_share: int = Field(default=64, ge=1)
    """How many samples must have ended before `max_failed_share` applies."""

    failed_share_window: int = Field(default=1024, ge=1)
    """How many of the latest samples `max_failed_share` looks at, so that a judge that dies late stops the run too."""

    limits: dict[str, LimitConfig] = Field(default_factory=dict)
    """Limits by the name of a service. ``default`` holds for every call of the function, ``retry`` besides for every
    call that is made again, others for the calls inside ``async with reward_loop.limit(name)``."""

    retry: RetryConfig = Field(default_factory=RetryConfig)
    """When a call that failed is made again."""

    cache: CacheConfig = Field(default_factory=CacheConfig)
    """Whether equal calls are made once."""

    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    """What the calls of a run may use."""

    job: str | None = None
    """The limiter service of the job, which keeps limits, budget and failures for all workers. Set by runs that have
    several workers; without it, each manager has its own."""

    worker_start_timeout_s: float = Field(default=300.0, gt=0)
    """In a verl run: seconds within which every reward worker must have loaded the tokenizer and the function."""

    worker_answer_timeout_s: float = Field(default=60.0, gt=0)
    """In a verl run: seconds within which a reward worker must answer the trainer. The restart of a worker must fit
    in."""

    watchdog_s: float | None = Field(default=60.0, gt=0)
    """Samples that have been running for longer than this many seconds are logged, again every so many seconds;
    ``null`` for never. It holds for the samples of its own manager: several managers in a process may differ."""

    log_dir: str | None = None
    """Directory in which every process writes a JSONL file with a record of each sample; ``null`` for no records."""

    batch: BatchConfig = Field(default_factory=BatchConfig)
    """For the manager ``batch``."""

    group: GroupConfig = Field(default_factory=GroupConfig)
    """For the manager ``group``."""

    components: dict[str, ComponentConfig] = Field(default_factory=dict)
    """For the manager ``composite``: its rewards by name, in the order in which gates apply."""


class ServedModelConfig(Config):
    """A model, and the servers that it runs in."""

    model_path: str | None = None
    """A model directory in the format of transformers' ``save_pretrained``, or the name of a model of the Hugging
    Face hub: what is not in the cache is downloaded. Needed by every engine but ``external``."""

    served_model_name: str | None = None
    """The ``model`` that requests name; by default `model_path`, as in vLLM."""

    engine: Literal["vllm", "sglang", "transformers", "external"] = "transformers"
    """What runs the model. ``transformers`` is the embedded server: on the CPU, in float32, for small models.
    ``external``: nothing is started; `urls` are servers that run already."""

    kind: Literal["auto", "generative", "discriminative"] = "auto"
    """Whether the model writes, or gives logits; ``auto`` reads it from the model's ``config.json``."""

    urls: tuple[str, ...] = ()
    """For ``external``: the servers, each as ``http://host:port``."""

    replicas: int = Field(default=1, ge=1)
    """How many servers share the load."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """For vLLM and SGLang: over how many GPUs each copy of the model is split."""

    data_parallel_size: int = Field(default=1, ge=1)
    """For vLLM and SGLang: how many copies of the model each server runs."""

    trust_remote_code: bool = False
    """For vLLM and SGLang: run the Python code that the model's directory contains."""

    dtype: str = "auto"
    """For vLLM and SGLang: the precision, such as ``bfloat16`` or ``float32``; ``auto`` is the checkpoint's."""

    max_model_len: int | None = Field(default=None, ge=1)
    """For vLLM and SGLang: tokens of the longest prompt and its answer; by default what the model's ``config.json``
    says."""

    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """For vLLM and SGLang: the share of each GPU's memory that a server may take; by default the engine's own."""

    enable_sleep_mode: bool = False
    """Lets ``RewardModelManager.sleep`` free the memory that the model takes. It opens endpoints for administrators on
    the server."""

    engine_args: dict[str, Any] = Field(default_factory=dict)
    """More options of the engine's command line, as ``max_num_seqs: 64`` for ``--max-num-seqs 64``. ``true`` stands for
    a flag without a value, ``false`` or ``null`` leaves an option out, mappings are passed as JSON."""

    max_batch_size: int = Field(default=64, ge=1)
    """For ``transformers``: how many requests a server runs in one batch, at most."""

    max_wait_ms: float = Field(default=3.0, ge=0)
    """For ``transformers``: how many milliseconds a request waits for others to share its batch, at most."""

    threads: int = Field(default=1, ge=1)
    """CPU threads of each server, where it runs on the CPU."""

    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds within which a server must be ready, the download of its model included."""

    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables for the servers."""


class RewardModelConfig(ServedModelConfig):
    """Reward models, the servers that they run in, and the router in front of them."""

    models: dict[str, ServedModelConfig] = Field(default_factory=dict)
    """More models behind the same router, under the names that requests give them."""

    placement: Literal["local", "ray", "colocated"] = "local"
    """Where servers run: as processes beside this one; in Ray actors that reserve their GPUs, on any node; or, in a
    verl run, on the GPUs that train, awake only while the rollout sleeps."""

    placement_timeout_s: float = Field(default=300.0, gt=0)
    """For the placement ``ray``: seconds within which Ray must have found room for all servers."""

    starts_at_a_time: int = Field(default=2, ge=1)
    """How many servers may be starting at a time: each reads the whole model from disk."""

    host: str = "127.0.0.1"
    """The address that the router listens on, and that `reward_router_address` names. Servers are reached by loopback
    only."""

    router_port: int | None = Field(default=None, ge=1, le=65535)
    """The router's port; by default any free one."""

    request_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds from a request's arrival at the router to the end of its answer; waiting for a server counts."""

    health_interval_s: float = Field(default=2.0, gt=0)
    """Seconds between two of the router's health checks of a server in use."""

    health_timeout_s: float = Field(default=4.0, gt=0)
    """Seconds that a health check of a server in use may take."""

    max_failed_checks: int = Field(default=2, ge=1)
    """A server that fails this number of health checks in a row gets no more requests until a check succeeds. A check
    that times out does not count while the server still answers requests."""

    max_restarts: int = Field(default=3, ge=0)
    """How often a process that died is started again within `restart_window_s`; after that it is given up."""

    restart_window_s: float = Field(default=600.0, gt=0)
    """Seconds after which a restart no longer counts."""

    log_dir: str | None = None
    """Where the servers and the router write their logs; by default a new temporary directory, which is kept."""

    @field_validator("host")
    @classmethod
    def _is_no_wildcard(cls, host: str) -> str:
        if host in ("", "0.0.0.0", "::"):
            raise ValueError("name the address that clients reach, not a wildcard")
        return host


C = TypeVar("C", bound=BaseModel)


def parse(cls: type[C], options: Mapping[str, Any] | C | None, where: str) -> C:
    """Build an option group from a mapping (a dict, or a Hydra config), or from nothing.

    Args:
        cls: the group.
        options: its options; an instance is returned as it is, ``None`` gives the defaults.
        where: the group's name in messages, such as ``reward_loop``.

    Raises:
        ConfigError: an option is unknown, missing or malformed; the message names it.
    """
    if isinstance(options, cls):
        return options
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"{where}: expected a mapping of options, got {shorten(options)}")
    try:
        return cls.model_validate(_plain(options or {}))
    except ValidationError as error:
        problems = [_problem(cls, detail, where) for detail in error.errors()]
    raise ConfigError("\n".join(problems))


def _plain(value: Any) -> Any:
    """Turn the containers of other libraries into dicts and lists, which pydantic validates."""
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | tuple):
        return [_plain(item) for item in value]
    return value


def _problem(cls: type[BaseModel], detail: Mapping[str, Any], where: str) -> str:
    location = [str(part) for part in detail["loc"]]
    option = ".".join([where, *location])
    if detail["type"] == "extra_forbidden":
        known = _group(cls, location[:-1]).model_fields
        hint = did_you_mean(location[-1], known) or "."
        return f"{option}: unknown option{hint} Known here: {listing(known)}"
    if detail["type"] == "missing":
        return f"{option}: required, and not given"
    return f"{option}: {detail['msg'].removeprefix('Value error, ')}; got {shorten(detail['input'])}"


def _group(cls: type[BaseModel], location: list[str]) -> type[BaseModel]:
    """Follow a path of field names to the option group that it ends in."""
    names = iter(location)
    for name in names:
        field = cls.model_fields.get(name)
        annotation = field.annotation if field else None
        for candidate in (annotation, *get_args(annotation)):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                cls = candidate
                if get_origin(annotation) is dict:
                    next(names, None)  # the user's own name for one of these groups
                break
    return cls
