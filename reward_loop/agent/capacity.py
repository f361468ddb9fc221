"""What a run of a given size asks of each part of the library, and which part reaches its capacity first.

Arithmetic with measured costs, for a verl run with reward workers. docs/scale.md shows its steps, and
``python -m benchmarks.scale`` measures the costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from reward_loop.errors import ConfigError

__all__ = ["BUSY", "MEASURED", "SOURCE", "Cost", "Costs", "PartLoad", "RunSize", "part_loads"]

BUSY = 0.7
"""The share of its capacity above which a part is busy. At this share, samples that arrive at random times wait about
twice as long as their own work takes (0.7 / 0.3, for a queue with random work)."""

ROUTER_IN_FLIGHT = 16_384
"""Requests that a router has in flight by default; further ones wait."""

ROUTER_CONNECTIONS = 28_000
"""Connections that one address can have to one router: Linux has 28,232 local ports for them by default
(``net.ipv4.ip_local_port_range``). The exit of the tunnel connects from one address."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The CPU time of a process for one sample or request, in microseconds of one core."""

    fixed_us: float
    per_1000_tokens_us: float = 0.0
    """In addition, for each 1,000 tokens of the response."""

    def seconds(self, tokens: float) -> float:
        """The CPU seconds for a response with this number of tokens."""
        return (self.fixed_us + self.per_1000_tokens_us * tokens / 1000) / 1e6


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of each part."""

    call: Cost
    """In an agent loop worker: the Ray call to a reward worker. verl's own work is not included."""
    worker: Cost
    """In a reward worker: receiving, decoding, scoring and recording a sample, with a function that does nothing."""
    request: Cost
    """In a reward worker: one request to a judge."""
    tunnel: Cost
    """In the exit of the tunnel to the router: one request."""
    router: Cost
    """In the router: one request."""
    limits: Cost
    """In the limiter service: the permit and the counts of one sample."""
    events: Cost
    """In the trainer of the mode ``reward_pipeline``: the events of one sample."""


MEASURED = Costs(
    call=Cost(2100.0, 434.0),
    worker=Cost(2456.0, 111.0),
    request=Cost(461.0, 106.0),
    tunnel=Cost(150.0, 17.0),
    router=Cost(167.0),
    limits=Cost(122.0),
    events=Cost(506.0),
)
"""The costs measured on the machine of `SOURCE`."""

SOURCE = "python -m benchmarks.scale on two virtual cores beside other load (docs/scale.md)"
"""Where the costs in `MEASURED` come from."""


@dataclass(frozen=True, slots=True)
class RunSize:
    """The size of a run.

    Raises:
        ConfigError: a number is not positive, or not finite.
    """

    nodes: int = 64
    node_rate: float = 16.0
    """Samples that a node generates per second: 16 is 8 GPUs with 4,000 tokens per second each, and responses of 2,000
    tokens."""
    in_flight: int = 20_000
    """Samples without a reward, including those that wait for a judge."""
    tokens: int = 2000
    """Tokens of a response."""
    requests: float = 1.0
    """Requests to a judge per sample; 0 for a function that computes its score itself."""
    function_ms: float = 0.0
    """CPU time of the user's function per sample, in milliseconds, on the event loop of a reward worker."""
    agent_workers: int = 8
    """verl's ``actor_rollout_ref.rollout.agent.num_workers``."""
    workers: int = 8
    """verl's ``reward.num_workers``."""
    routers: int = 1

    def __post_init__(self) -> None:
        for name in ("nodes", "node_rate", "in_flight", "tokens", "agent_workers", "workers", "routers"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"{name}: a number above 0, got {getattr(self, name)}")
        for name in ("requests", "function_ms"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{name}: a number from 0, got {getattr(self, name)}")

    @property
    def rate(self) -> float:
        """Samples per second of the whole run."""
        return self.nodes * self.node_rate

    @property
    def seconds_in_flight(self) -> float:
        """The mean time from the end of a sample's generation to its reward, by Little's law."""
        return self.in_flight / self.rate


@dataclass(frozen=True, slots=True)
class PartLoad:
    """What a run asks of one part."""

    part: str
    load: float
    capacity: float
    unit: str
    """``cores``, or ``requests``."""
    remedy: str
    """What to change when the part is busy."""

    @property
    def used(self) -> float:
        """The used share of the capacity; above 1, the part cannot keep up."""
        return self.load / self.capacity

    def full_at(self, size: RunSize) -> float:
        """The number of nodes at which the part reaches its capacity, if the samples in flight grow with the nodes."""
        return size.nodes / self.used if self.load else math.inf


def part_loads(size: RunSize, costs: Costs = MEASURED) -> list[PartLoad]:
    """Return the load of each part, the most used part first.

    A process counts as one core: agent loop workers, reward workers, router and limiter service each run one event
    loop. Parts without load are left out.
    """
    asked = size.rate * size.requests
    other_nodes = 1 - 1 / size.nodes
    work_s = costs.worker.seconds(size.tokens) + size.function_ms / 1000
    worker_cores = size.rate * work_s + asked * costs.request.seconds(size.tokens)
    call_cores = size.rate * costs.call.seconds(size.tokens)
    a_router_a_node = "run `reward-loop route` on each node, and let the function ask 127.0.0.1 (docs/scale.md)"
    loads = [
        PartLoad(
            "agent loop workers, calls",
            call_cores,
            size.agent_workers,
            "cores",
            f"actor_rollout_ref.rollout.agent.num_workers={_enough(call_cores)} or more",
        ),
        PartLoad(
            "reward workers", worker_cores, size.workers, "cores", f"reward.num_workers={_enough(worker_cores)} or more"
        ),
        PartLoad("router", asked * costs.router.seconds(size.tokens), size.routers, "cores", a_router_a_node),
        PartLoad(
            "router, requests in flight",
            size.in_flight if size.requests else 0,
            size.routers * ROUTER_IN_FLIGHT,
            "requests",
            f"reward_model.server.max_in_flight={size.in_flight}"
            if size.in_flight <= size.routers * ROUTER_CONNECTIONS
            else a_router_a_node,
        ),
        # Only the router that serves a reward model has a tunnel; several routers are started by the user.
        PartLoad(
            "tunnel to the router",
            asked * other_nodes * costs.tunnel.seconds(size.tokens) if size.routers == 1 else 0,
            1,
            "cores",
            a_router_a_node,
        ),
        PartLoad(
            "limiter service",
            size.rate * costs.limits.seconds(size.tokens),
            1,
            "cores",
            "share a limit among fewer calls: one permit for a batch of samples (reward_loop.batch)",
        ),
        PartLoad(
            "trainer, events",
            size.rate * costs.events.seconds(size.tokens),
            1,
            "cores",
            "use the mode sync or separate_async, which polls instead",
        ),
    ]
    return sorted((load for load in loads if load.load), key=lambda load: load.used, reverse=True)


def _enough(cores: float) -> int:
    """The number of processes with which none is busier than `BUSY`."""
    return max(1, math.ceil(cores / BUSY))
