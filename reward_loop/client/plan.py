"""Collects the requests of reward functions instead of sending them, for an estimate before a run."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from reward_loop.errors import RequestError

__all__ = ["PlannedRequest", "RequestPlan", "active_plan"]

_TEXTS = ("messages", "prompt", "input", "query", "documents", "text")
"""The fields of a request that contain its texts."""

NOT_SENT = "not sent: this is a dry run"

_active: RequestPlan | None = None
_is_hooked = False


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request that was not sent."""

    url: str
    model: str | None
    characters: int
    """The number of characters of its texts."""
    max_tokens: int | None
    """The largest number of tokens of the reply; ``None`` if the request does not limit it."""


class RequestPlan:
    """Within ``with``, no request leaves this process, whichever thread makes it.

    Each request of `reward_loop.client` is collected and fails. Connections that other Python code opens are refused:
    their requests are not known. Not covered are other processes, and libraries that open sockets in C.
    """

    def __init__(self) -> None:
        self.requests: list[PlannedRequest] = []
        self.refused = 0
        """The number of connections that were refused."""

    def __enter__(self) -> Self:
        global _active, _is_hooked
        if not _is_hooked:
            sys.addaudithook(_refuse_connections)  # cannot be removed; without a plan, it does nothing
            _is_hooked = True
        _active = self
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        _active = None

    def add(self, url: str, body: Mapping[str, Any]) -> RequestError:
        """Collect a request, and return the error with which it must fail."""
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        self.requests.append(
            PlannedRequest(
                url=url,
                model=body.get("model"),
                characters=sum(_characters(body.get(name)) for name in _TEXTS),
                max_tokens=limit if isinstance(limit, int) else None,
            )
        )
        return RequestError(f"POST {url} was {NOT_SENT}")


def active_plan() -> RequestPlan | None:
    """Return the plan that collects requests now; ``None`` if requests are sent."""
    return _active


def _refuse_connections(event: str, arguments: tuple[Any, ...]) -> None:
    plan = _active
    if plan is None or event not in ("socket.connect", "socket.getaddrinfo"):
        return
    if event == "socket.connect" and arguments[0].family not in (socket.AF_INET, socket.AF_INET6):
        return
    plan.refused += 1
    raise ConnectionRefusedError(NOT_SENT)


def _characters(value: Any) -> int:
    """Return the number of characters of all texts in a value, except for the roles and types of messages."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(item) for name, item in value.items() if name not in ("role", "type"))
    if isinstance(value, list | tuple):
        return sum(map(_characters, value))
    return 0
