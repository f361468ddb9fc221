"""Which of the servers that could take a request gets it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from reward_loop.router.backend import Backend
from reward_loop.router.config import RouterConfig
from reward_loop.router.headers import RawHeader, find

__all__ = ["Content", "LeastInFlight", "Policy", "RoundRobin", "TwoChoices", "policy_for"]


class Policy(Protocol):
    """Chooses a server."""

    def key(self, headers: Sequence[RawHeader], body: bytes) -> int:
        """What is the same for requests that belong to the same server, if that matters."""

    def choose(self, backends: Sequence[Backend], key: int) -> Backend:
        """One of ``backends``, of which there is at least one."""


class _ByLoad:
    def key(self, headers: Sequence[RawHeader], body: bytes) -> int:
        return 0


class RoundRobin(_ByLoad):
    """The next one in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, backends: Sequence[Backend], key: int) -> Backend:
        self._turn += 1
        return backends[self._turn % len(backends)]


class LeastInFlight(_ByLoad):
    """The one with the fewest requests in flight; among equals, the one that has had the fewest."""

    def choose(self, backends: Sequence[Backend], key: int) -> Backend:
        return min(backends, key=lambda backend: (backend.in_flight, backend.requests))


class TwoChoices(_ByLoad):
    """The less busy one of two drawn at random: nearly as even as the least busy of all, and no herd."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, backends: Sequence[Backend], key: int) -> Backend:
        if len(backends) == 1:
            return backends[0]
        first = int(self._random.random() * len(backends))
        second = (first + 1 + int(self._random.random() * (len(backends) - 1))) % len(backends)
        return min(backends[first], backends[second], key=lambda backend: backend.in_flight)


class Content:
    """The same one for the same content, by rendezvous hashing.

    When a server goes, only its own requests move; they come back with it. The choice depends on the servers' URLs and
    on the content alone, so it is the same in every run and in every process.

    Args:
        header: the request header that decides, in lower case; the body decides where it is missing.
        prefix: how many bytes of the body decide; 0 for all.
    """

    def __init__(self, header: bytes | None = None, prefix: int = 0) -> None:
        self._header = header
        self._prefix = prefix or None
        self._seeds: dict[str, int] = {}

    def key(self, headers: Sequence[RawHeader], body: bytes) -> int:
        content = find(headers, self._header) if self._header else None
        return _hash(body[: self._prefix] if content is None else content)

    def choose(self, backends: Sequence[Backend], key: int) -> Backend:
        return max(backends, key=lambda backend: _mix(key ^ self._seed(backend.url)))

    def _seed(self, url: str) -> int:
        seed = self._seeds.get(url)
        if seed is None:
            seed = self._seeds[url] = _hash(url.encode())
        return seed


def _hash(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def _mix(value: int) -> int:
    """The finaliser of splitmix64: every bit of the value matters to every bit of the result."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


def policy_for(config: RouterConfig) -> Policy:
    """The policy that the options name."""
    match config.policy:
        case "round_robin":
            return RoundRobin()
        case "least_in_flight":
            return LeastInFlight()
        case "two_choices":
            return TwoChoices()
        case "content":
            header = config.content_header
            return Content(header.lower().encode() if header else None, config.content_prefix)
