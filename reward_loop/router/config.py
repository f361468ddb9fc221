"""The router's options."""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from reward_loop._util.api_keys import checked_api_key
from reward_loop.config import Config

API_KEY_VARIABLE = "REWARD_LOOP_API_KEY"
WORKER_API_KEY_VARIABLE = "REWARD_LOOP_WORKER_API_KEY"

Kind = Literal["generative", "discriminative"]
"""Whether a server generates text (chat, completions) or returns numbers (classify, score, embeddings)."""

PolicyName = Literal["round_robin", "least_in_flight", "affinity"]
"""The load-balancing policies."""

Engine = Literal["vllm", "sglang", "transformers", "external"]


class BackendConfig(Config):
    """A server behind the router."""

    url: str
    """``http://host:port``"""

    models: tuple[str, ...] = ()
    """The model names that requests use in their `model` field; by default, those that ``/v1/models`` lists."""

    kind: Kind | None = None
    """Requests that this kind of server cannot answer are rejected; ``None`` rejects nothing."""

    engine: Engine = "external"
    """The inference engine. For ``vllm``, the health check includes whether the engine sleeps. For a discriminative
    ``sglang`` server, requests with empty texts are rejected, because they can crash it."""

    @field_validator("url")
    @classmethod
    def _is_an_origin(cls, url: str) -> str:
        url = url.rstrip("/")
        found = re.fullmatch(r"http://(?:\[([0-9a-fA-F:.]+)\]|[A-Za-z0-9._~%!$&'()*+,;=-]+)(?::(\d{1,5}))?", url)
        if not found or int(found[2] or 0) > 65535:
            raise ValueError("expected http://host:port")
        if found[1]:
            IPv6Address(found[1])  # Raises a ValueError.
        return url


class SharedRouterOptions(Config):
    """The options of the router that `RewardModelConfig` has, too, with the same defaults."""

    request_timeout_s: float = Field(default=290.0, gt=0)
    """Seconds from the arrival of a request at the router to the end of its answer. Waiting for a server counts. It is
    below the timeout of the clients (300 s in `reward_loop.client`), so that they get the router's explanation: raise
    it for requests with a longer timeout."""

    # By these three defaults, a frozen server is found within 10 s: one interval, and two checks that time out.
    health_interval_s: float = Field(default=2.0, gt=0)
    """Seconds between two of the router's health checks of a server in use."""

    health_timeout_s: float = Field(default=4.0, gt=0)
    """Seconds that a health check of a server in use may take."""

    max_failed_checks: int = Field(default=2, ge=1)
    """A server that fails this number of health checks in a row gets no more requests until a check succeeds. A check
    that times out does not count while the server still answers requests."""


class RouterConfig(SharedRouterOptions):
    """The options of the router."""

    policy: PolicyName = "round_robin"
    """Which server gets a request: ``round_robin``, the next in turn; ``least_in_flight``, the one with the fewest
    requests in flight; ``affinity``, the same one for all generative requests of a group, which share a prefix cache,
    unless that server has far more requests in flight than the others. The group is in the header
    ``x-reward-loop-group``, as the library's client sends it, or else the beginning of the prompt."""

    api_key: str | None = Field(default=None, min_length=1, repr=False)
    """The API key that clients must send as a bearer token with every request, except for ``/health``, ``/live`` and
    ``/ready``. It is never forwarded to servers."""

    worker_api_key: str | None = Field(default=None, min_length=1, repr=False)
    """The API key that is sent to the servers as a bearer token, instead of the client's."""

    trusted_addresses: tuple[str, ...] = ()
    """IP addresses whose requests need no API key: those of the nodes of a verl run. All others need it, even if it is
    not set."""

    @field_validator("api_key", "worker_api_key")
    @classmethod
    def _is_a_key(cls, key: str | None, info: ValidationInfo) -> str | None:
        return key and checked_api_key(key, str(info.field_name))
