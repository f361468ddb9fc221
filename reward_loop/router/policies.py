"""Load-balancing policies: the choice among the available servers."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from reward_loop.router.backend import Backend
from reward_loop.router.config import PolicyName
from reward_loop.router.messages import GROUP, RawHeader, find

_MAX_LOAD_FACTOR = 1.25
"""With `Affinity`, the largest number of requests in flight of a server, divided by the mean of all servers. With a
larger factor, tournaments on servers that are nearly idle take longer than with round robin (`benchmarks.affinity`)."""

_MAX_GROUPS = 16384
"""The number of groups whose servers `Affinity` remembers, the most recent ones."""

_PROMPT_START = 1024
"""The number of characters at the beginning of a prompt that are the key of a request without a group."""


class Key(NamedTuple):
    """What a generative request is routed by."""

    group: int
    """The same for the requests of a group."""
    request: int
    """Decides between servers that are equal otherwise; the same in every run."""


class Policy(ABC):
    """A load-balancing policy: chooses a server for a request."""

    def key(self, headers: Sequence[RawHeader], body: bytes) -> Key | None:
        """Return the routing key of a generative request; ``None`` if it has none, or the policy needs none."""
        return None

    @abstractmethod
    def choose(self, backends: Sequence[Backend], key: Key | None) -> Backend:
        """Return one of `backends`, which is not empty."""


class RoundRobin(Policy):
    """Chooses the servers in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, backends: Sequence[Backend], key: Key | None) -> Backend:
        self._turn += 1
        # Modulo at the use: the number of servers changes while one is out of use.
        return backends[self._turn % len(backends)]


class LeastInFlight(Policy):
    """Chooses the server with the fewest requests in flight; of equal ones, the request decides.

    So the same generative requests, one after another, reach the same servers in every run.
    """

    def key(self, headers: Sequence[RawHeader], body: bytes) -> Key | None:
        return Key(0, zlib.crc32(body))

    def choose(self, backends: Sequence[Backend], key: Key | None) -> Backend:
        if key is None:
            # By the requests so far, too: requests that come one by one would otherwise all reach the first server.
            return min(backends, key=lambda backend: (backend.in_flight, backend.requests))
        fewest = min(backend.in_flight for backend in backends)
        equal = [backend for backend in backends if backend.in_flight == fewest]
        return equal[key.request % len(equal)]


class Affinity(LeastInFlight):
    """Chooses the same server for all requests of a group, whose prompts begin alike, until that server is overloaded.

    A new group, and one whose server is overloaded or out of use, gets the server with the fewest requests in flight,
    and stays there. So do requests without a key, one by one. A server that leaves moves its own groups only, and a new
    server moves none.

    Rendezvous hashing with the same bound needs no memory. But it places groups regardless of the load, so it moves
    many more of their requests: `benchmarks.affinity` compares both.
    """

    def __init__(self) -> None:
        self._servers: OrderedDict[int, Backend] = OrderedDict()

    def key(self, headers: Sequence[RawHeader], body: bytes) -> Key | None:
        content = find(headers, GROUP) or _prompt_start(body)
        # The hash only: the prompts of all remembered groups would take much memory.
        return Key(hash(content), zlib.crc32(body)) if content else None

    def choose(self, backends: Sequence[Backend], key: Key | None) -> Backend:
        server = None if key is None else self._servers.get(key.group)
        if server is None or server not in backends or is_overloaded(server, backends):
            server = super().choose(backends, key)
        # Also if the server has changed: the new one has the prompt in its cache now, so the group stays there.
        if key is not None:
            self._servers[key.group] = server
            self._servers.move_to_end(key.group)
            if len(self._servers) > _MAX_GROUPS:
                self._servers.popitem(last=False)
        return server


def is_overloaded(server: Backend, backends: Sequence[Backend]) -> bool:
    """Return whether a server would have too many requests in flight with one more; an idle one never has."""
    total = sum(backend.in_flight for backend in backends) + 1
    return server.in_flight > 0 and server.in_flight + 1 > _MAX_LOAD_FACTOR * total / len(backends)


def _prompt_start(body: bytes) -> bytes | None:
    """Return the beginning of a prompt: of the first user message of a chat, or of the text or the token ids.

    The system message is left out, because it is often the same for all samples.
    """
    try:
        fields = orjson.loads(body)
        for name in ("messages", "prompt", "text", "input", "input_ids"):
            if prompt := fields.get(name):
                return orjson.dumps(_first_user_message(prompt)[:_PROMPT_START])
    except (ValueError, TypeError, AttributeError, KeyError):  # It is not JSON, or its prompt has another form.
        pass
    return None


def _first_user_message(prompt: Any) -> Any:
    """Return the content of the first user message if `prompt` is a chat, and `prompt` itself if not."""
    if isinstance(prompt[0], dict):
        return next((message for message in prompt if message["role"] == "user"), prompt[0])["content"]
    return prompt


def policy_for(name: PolicyName) -> Policy:
    """Return a new policy."""
    policies: dict[PolicyName, type[Policy]]
    policies = {"round_robin": RoundRobin, "least_in_flight": LeastInFlight, "affinity": Affinity}
    return policies[name]()
