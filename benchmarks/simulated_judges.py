"""Simulated judge servers with prefix caches, in virtual time, behind the router's own policies.

A server works in steps, like vLLM and SGLang: in each step, every running request decodes one token, and new requests
are prefilled as far as the step's token budget allows. Parts of a prompt are cached from the moment they are scheduled,
as in vLLM, and the least recently used ones are evicted. The memory of running requests is not simulated.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from statistics import quantiles
from typing import Any

from benchmarks.judge_workloads import Prompt, Unit
from reward_loop.router.backend import Backend
from reward_loop.router.policies import Affinity, Key, LeastInFlight, Policy, is_overloaded

__all__ = ["Outcome", "Rendezvous", "moved_keys", "simulate"]

STEP_S = 0.010
PREFILL_S = 40e-6
"""Seconds of a step for each prefilled token: 25,000 per second, the order of magnitude of an 8B model on one H100."""
DECODE_S = 30e-6
"""Seconds of a step for each running request."""
MAX_RUNNING = 64
STEP_TOKENS = 4096
CACHE_TOKENS = 100_000


@dataclass(eq=False)
class Request:
    prompt: Prompt
    reply: int
    on_end: Callable[[], None]
    left: int = 0
    """Tokens that are not prefilled yet."""


@dataclass(eq=False)
class Server:
    """A simulated server; it has the fields of a `Backend` that policies use."""

    url: str
    clock: Clock
    in_flight: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    prefilled: int = 0
    waiting: deque[Request] = field(default_factory=deque)
    prefilling: deque[Request] = field(default_factory=deque)
    decoding: list[tuple[int, int, Request]] = field(default_factory=list)
    """A heap by the step in which the reply ends."""
    cache: OrderedDict[Prompt, int] = field(default_factory=OrderedDict)
    cached_tokens: int = 0
    steps: int = 0
    is_busy: bool = False

    def receive(self, request: Request) -> None:
        self.in_flight += 1
        self.requests += 1
        self.waiting.append(request)
        if not self.is_busy:
            self.is_busy = True
            self._step()

    def _step(self) -> None:
        budget = STEP_TOKENS - len(self.decoding)
        started: list[Request] = []
        while budget > 0:
            if not self.prefilling:
                if not self.waiting or len(self.decoding) + len(started) >= MAX_RUNNING:
                    break
                self._admit(self.waiting.popleft())
            request = self.prefilling[0]
            tokens = min(budget, request.left)
            request.left -= tokens
            self.prefilled += tokens
            budget -= tokens
            if not request.left:
                started.append(self.prefilling.popleft())
        prefilled = STEP_TOKENS - len(self.decoding) - budget
        seconds = STEP_S + PREFILL_S * prefilled + DECODE_S * len(self.decoding)
        self.clock.after(seconds, lambda: self._end_step(started))

    def _end_step(self, started: list[Request]) -> None:
        self.steps += 1
        for request in started:
            heapq.heappush(self.decoding, (self.steps + request.reply, next(self.clock.numbers), request))
        while self.decoding and self.decoding[0][0] <= self.steps:
            request = heapq.heappop(self.decoding)[2]
            self.in_flight -= 1
            request.on_end()
        if self.waiting or self.prefilling or self.decoding:
            self._step()
        else:
            self.is_busy = False

    def _admit(self, request: Request) -> None:
        total, hit, missed = 0, 0, False
        for end in range(1, len(request.prompt) + 1):
            prefix, tokens = request.prompt[:end], request.prompt[end - 1].tokens
            total += tokens
            missed = missed or prefix not in self.cache
            if not missed:
                hit += tokens
        # The last token is always computed, for its logits.
        request.left = max(1, total - hit)
        self.prompt_tokens += total
        for end in range(len(request.prompt), 0, -1):  # The end of a prompt is evicted before its beginning.
            prefix = request.prompt[:end]
            if prefix not in self.cache:
                self.cache[prefix] = prefix[-1].tokens
                self.cached_tokens += prefix[-1].tokens
            self.cache.move_to_end(prefix)
        while self.cached_tokens > CACHE_TOKENS:
            self.cached_tokens -= self.cache.popitem(last=False)[1]
        self.prefilling.append(request)


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self.numbers), call))

    def run(self) -> None:
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()


@dataclass(frozen=True)
class Outcome:
    """What a policy achieved."""

    per_s: float
    """Judged units per second."""
    p99_s: float
    """Seconds from the start of a unit to its last reply."""
    prefilled: int
    """Prompt tokens that were computed."""
    prompt_tokens: int
    largest: float
    """The prompt tokens of the most loaded server, divided by the mean."""


def simulate(policy: Policy, servers: int, units: list[Unit], in_flight: int) -> Outcome:
    """Judge all units: when one has been judged, the next one starts, as in a loop of rollouts.

    Args:
        policy: one of the router.
        servers: their number.
        units: what is judged.
        in_flight: the number of units that are judged at the same time.
    """
    clock = Clock()
    all_servers = [Server(f"http://10.0.0.{i}:8000", clock) for i in range(servers)]
    todo = iter(units)
    seconds: list[float] = []

    def start_next() -> None:
        if (unit := next(todo, None)) is None:
            return
        began, left = clock.now, len(unit.prompts)

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                seconds.append(clock.now - began)
                start_next()

        group = [(b"x-reward-loop-group", unit.group.encode())]
        for number, (prompt, reply) in enumerate(zip(unit.prompts, unit.replies, strict=True)):
            key = policy.key(group, f"{unit.group} {began} {number}".encode())
            server: Server = policy.choose(all_servers, key)  # type: ignore[arg-type,assignment]
            server.receive(Request(prompt, reply, ended))

    for _ in range(in_flight):
        start_next()
    clock.run()
    loads = [server.prompt_tokens for server in all_servers]
    return Outcome(
        len(units) / clock.now,
        quantiles(seconds, n=100)[-1],
        sum(server.prefilled for server in all_servers),
        sum(loads),
        max(loads) * servers / sum(loads),
    )


class Rendezvous(Affinity):
    """Rendezvous hashing with the bound of `Affinity`: the first server in the order of the key that is not overloaded.

    If all are, the one with the fewest requests in flight. For comparison: it needs no memory.
    """

    def choose(self, backends: Sequence[Backend], key: Key | None) -> Backend:
        free = [backend for backend in backends if not is_overloaded(backend, backends)]
        if not free:
            return LeastInFlight.choose(self, backends, key)
        return max(
            free, key=lambda backend: blake2b(f"{key and key.group} {backend.url}".encode(), digest_size=8).digest()
        )


def moved_keys(servers: int, keys: int = 2000) -> tuple[float, float]:
    """Return the share of groups that get another server after one of the servers leaves, and after one is added."""
    clock = Clock()
    backends: Any = [Server(f"http://10.0.0.{i}:8000", clock) for i in range(servers + 1)]
    shares = []
    for after in (backends[1:-1], backends):
        policy, homes = Affinity(), []
        for server in backends:
            server.requests = 0
        for key in range(keys):
            homes.append(policy.choose(backends[:-1], Key(key, key)))
            homes[-1].requests += 1
        shares.append(sum(policy.choose(after, Key(key, key)) is not homes[key] for key in range(keys)) / keys)
    return shares[0], shares[1]
