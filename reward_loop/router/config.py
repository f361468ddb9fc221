"""The router's options."""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from typing import Literal

from pydantic import Field, field_validator

from reward_loop.config import Config

__all__ = [
    "API_KEY_VARIABLE",
    "WORKER_API_KEY_VARIABLE",
    "BackendConfig",
    "Engine",
    "Kind",
    "PolicyName",
    "RequestKind",
    "RouterConfig",
]

API_KEY_VARIABLE = "REWARD_LOOP_API_KEY"
WORKER_API_KEY_VARIABLE = "REWARD_LOOP_WORKER_API_KEY"

Kind = Literal["generative", "discriminative"]
"""Whether a server writes (chat, completions), or gives numbers (classify, score, embeddings)."""

RequestKind = Literal["generative", "discriminative", "reranking"]
"""What a request asks for. Discriminative servers rerank, and so do generative ones of SGLang, by the next token's
probability."""

Engine = Literal["vllm", "sglang", "transformers", "external"]

PolicyName = Literal["round_robin", "least_in_flight", "two_choices", "content"]


class BackendConfig(Config):
    """A server behind the router."""

    url: str
    """``http://host:port`` or ``https://host:port``."""

    models: tuple[str, ...] = ()
    """The names that requests for it have in their `model` field; by default, what its ``/v1/models`` lists."""

    kind: Kind | None = None
    """Requests that such a server cannot answer are refused; ``None`` refuses nothing."""

    engine: Engine = "external"
    """What runs it. A ``vllm`` server is asked whether it sleeps; a discriminative ``sglang`` server is spared the
    empty texts that can end it."""

    health_path: str = Field(default="/health", pattern="^/[!-~]*$")
    """A GET of it is answered with a status below 400 by a server that is well."""

    @field_validator("url")
    @classmethod
    def _is_an_origin(cls, url: str) -> str:
        url = url.rstrip("/")
        found = re.fullmatch(r"https?://(\[[0-9a-fA-F:.]+\]|[^\s/:@?#\[\]]+)(?::(\d{1,5}))?", url)
        if not found or int(found[2] or 0) > 65535:
            raise ValueError("expected http://host:port")
        host = found[1]
        if host.startswith("["):
            IPv6Address(host[1:-1])  # Raises a ValueError.
        elif not re.fullmatch(r"[A-Za-z0-9._~%!$&'()*+,;=-]+", host):
            raise ValueError(f"expected http://host:port; {host!r} is not a valid host")
        return url


class RouterConfig(Config):
    """How the router treats requests and servers."""

    policy: PolicyName = "round_robin"
    """Which server gets a request: the next in turn; the one with the fewest requests in flight; the less busy one of
    two drawn at random; or always the same one for the same content."""

    content_header: str | None = None
    """For the policy ``content``: the request header that decides, such as ``x-session-id``; where it is missing, the
    body does."""

    content_prefix: int = Field(default=0, ge=0)
    """For the policy ``content``: how many bytes of the body decide, so that prompts with a common beginning meet the
    same prefix cache; 0 for all."""

    request_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds from a request's arrival to the end of its answer; waiting, retries and back-off count."""

    max_attempts: int = Field(default=4, ge=1)
    """How many servers a request may fail on, until the last failure is passed on."""

    retry_share: float = Field(default=0.2, ge=0)
    """Answers with an error (429, 5xx), and requests that a frozen server has not answered, are retried for at most
    this share of all requests, and 50 more. A request whose connection broke is not counted: its server gets no
    requests until it is well again."""

    max_failures: int = Field(default=5, ge=1)
    """A server that answers so many requests in a row with a 5xx is taken out of use until it is well."""

    health_interval_s: float = Field(default=2.0, gt=0)
    """Seconds between two checks of a server in use."""

    health_timeout_s: float = Field(default=4.0, gt=0)
    """Seconds that a check of a server in use may take."""

    max_failed_checks: int = Field(default=2, ge=1)
    """A server that fails this number of checks in a row is taken out of use. A check that times out does not count
    while the server still answers requests."""

    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=0)
    """Longer request bodies are answered with 413."""

    max_header_bytes: int = Field(default=64 * 1024, ge=1024)
    """Longer request heads are answered with 431, or with 414 where it is the URL that is too long."""

    max_in_flight: int = Field(default=16384, ge=1)
    """How many requests are in work at a time; more of them wait."""

    max_queue: int = Field(default=16384, ge=0)
    """How many requests wait; more of them are answered with 503 and ``Retry-After``."""

    api_key: str | None = Field(default=None, min_length=1, repr=False)
    """Every request must carry it as a bearer token, except for ``/health``, ``/live``
    and ``/ready``. Servers never see it."""

    worker_api_key: str | None = Field(default=None, min_length=1, repr=False)
    """Sent as a bearer token to the servers, instead of what the client sent."""
