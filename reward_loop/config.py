"""The options, each with its meaning and default. Unknown keys are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from reward_loop._text import did_you_mean, listing, shorten
from reward_loop.errors import ConfigError

__all__ = ["Config", "Policy", "RewardLoopConfig", "RewardModelConfig", "parse"]

Policy = Literal["raise", "default", "mask"]
"""What happens to a sample without a score: raise, give it the default score, or leave it out of training."""


class Config(BaseModel):
    """Base of all option groups: immutable, and a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


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

    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """The run stops when more than this share of the latest samples failed; 1 never stops it."""

    min_samples_for_failed_share: int = Field(default=64, ge=1)
    """How many samples must have ended before `max_failed_share` applies."""

    failed_share_window: int = Field(default=1024, ge=1)
    """How many of the latest samples `max_failed_share` looks at, so that a judge that dies late stops the run too."""

    watchdog_s: float | None = Field(default=60.0, gt=0)
    """Every so many seconds, samples that have been in work for longer than that are logged; ``null`` for never."""

    log_dir: str | None = None
    """Where every process writes a JSONL file with a record of each sample; ``null`` for no records."""


class RewardModelConfig(Config):
    """A reward model, the servers that it runs in, and the router in front of them."""

    model_path: str
    """A model directory in the format of transformers' ``save_pretrained``."""

    served_model_name: str | None = None
    """The ``model`` that requests name; by default `model_path`, as in vLLM."""

    engine: Literal["transformers"] = "transformers"
    """What runs the model. ``transformers`` is the embedded server: on the CPU, in float32, for small models."""

    kind: Literal["auto", "generative", "discriminative"] = "auto"
    """Whether the model writes, or gives logits; ``auto`` reads it from the model's ``config.json``."""

    replicas: int = Field(default=1, ge=1)
    """How many servers share the load."""

    host: str = "127.0.0.1"
    """The address that the router listens on, and that `reward_router_address` names. The servers behind it are reached
    by loopback only."""

    router_port: int | None = Field(default=None, ge=1, le=65535)
    """The router's port; by default any free one."""

    max_batch_size: int = Field(default=64, ge=1)
    """How many requests a server runs in one batch, at most."""

    max_wait_ms: float = Field(default=3.0, ge=0)
    """How many milliseconds a request waits for others to share its batch, at most."""

    threads: int = Field(default=1, ge=1)
    """CPU threads of each server."""

    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds within which a server, or the router, must be ready."""

    request_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds from a request's arrival at the router to the end of its answer; waiting for a server counts."""

    max_restarts: int = Field(default=3, ge=0)
    """How often a process that died is started again within `restart_window_s`; after that it is given up."""

    restart_window_s: float = Field(default=600.0, gt=0)
    """Seconds after which a restart no longer counts."""

    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables for the servers."""

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
    return f"{option}: {detail['msg']}; got {shorten(detail['input'])}"


def _group(cls: type[BaseModel], location: list[str]) -> type[BaseModel]:
    """Follow a path of field names to the option group that it ends in."""
    for name in location:
        field = cls.model_fields.get(name)
        annotation = field.annotation if field else None
        for candidate in (annotation, *get_args(annotation)):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                cls = candidate
                break
    return cls
