"""Reserve Ray resources for servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from reward_loop.errors import ConfigError, ServerStartError
from reward_loop.serving.gpus import GPU, Accelerator

logger = logging.getLogger(__name__)

_PROGRESS_S = 15.0
_REMOVED_WITHIN_S = 10.0
_REMOVED_POLL_S = 0.05

Bundle = dict[str, float]


@dataclass(frozen=True, slots=True)
class Demand:
    """The resources that the servers of one model need."""

    servers: int
    gpus: int
    """The number of accelerators of each server, all on one node."""
    cpus: int
    """The number of CPU cores of each server."""


@dataclass(frozen=True, slots=True)
class Others:
    """Placement groups that another component, such as a trainer, will create after the servers' reservation."""

    name: str
    """A description for messages, such as ``group(s) of the trainer``."""
    groups: int
    """The number of groups, each on one node."""
    bundles: int
    """The number of bundles of each group."""
    bundle: Mapping[str, float]
    """The resources of each bundle."""


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """The Ray resources that one server runs on: a bundle of a placement group, with its accelerators and CPU cores."""

    group: PlacementGroup
    bundle: int
    gpus: int
    cpus: int
    accelerator: Accelerator = GPU

    @property
    def resources(self) -> dict[str, Any]:
        """The options of a Ray actor that runs here."""
        options = self.accelerator.options(self.gpus) if self.gpus else {"num_gpus": 0}
        strategy = PlacementGroupSchedulingStrategy(self.group, self.bundle)
        return {**options, "num_cpus": self.cpus, "scheduling_strategy": strategy}


@dataclass(eq=False)
class GpuReservation:
    """Reserves Ray resources for all servers in one placement group.

    - All accelerators of a server are on one node. The servers are on as few nodes as possible, so that whole nodes
      stay free. Servers without accelerators are spread over the nodes.
    - The servers never take the resources that `others` need, because verl's trainer would wait for them without a
      deadline: while the servers' group is placed, temporary groups hold these resources.
    - The reservation is kept when servers restart, until :meth:`release`.
    - Ray must be initialised.
    """

    others: Sequence[Others] = ()
    """Placement groups that other components will create."""
    _: KW_ONLY
    accelerator: Accelerator = GPU
    timeout_s: float = 300.0
    """Seconds to wait for free resources."""
    fix: str = "Lower the number of servers, tensor_parallel_size or data_parallel_size, or add nodes"
    """What to change if the cluster is too small, for the message."""
    _group: PlacementGroup | None = field(default=None, init=False)

    async def places(self, demands: Sequence[Demand]) -> list[list[GpuPlace]]:
        """Reserve the resources of all servers, and return the places of each model's servers.

        Raises:
            ConfigError: Ray is not initialised, or the cluster is too small even if it is idle.
            ServerStartError: the resources did not become free in time.
        """
        if not ray.is_initialized():
            raise ConfigError("placement='ray': Ray is not initialised; call ray.init() first")
        resource = self.accelerator.resource
        bundles: list[Bundle] = [
            {"CPU": demand.cpus, **({resource: demand.gpus} if demand.gpus else {})}
            for demand in demands
            for _ in range(demand.servers)
        ]
        if not bundles:
            return []
        # Servers without accelerators do not compete with `others`.
        others = self.others if any(demand.gpus for demand in demands) else ()
        arithmetic = self._arithmetic(demands, others, await asyncio.to_thread(_nodes))
        await self._reserve(bundles, others, arithmetic)
        assert self._group is not None
        numbers = iter(range(len(bundles)))
        return [
            [
                GpuPlace(self._group, next(numbers), demand.gpus, demand.cpus, self.accelerator)
                for _ in range(demand.servers)
            ]
            for demand in demands
        ]

    def release(self) -> None:
        """Release all reserved resources."""
        group, self._group = self._group, None
        if group is not None:
            _remove(group)

    async def _reserve(self, bundles: list[Bundle], others: Sequence[Others], arithmetic: str) -> None:
        """Create the servers' placement group, while temporary groups hold what ``others`` need."""
        resource = self.accelerator.resource
        # Each piece must be on one node. The largest comes first, before smaller pieces split the nodes.
        wanted: list[tuple[float, int, Others | None]] = [
            (other.bundles * other.bundle.get(resource, 0), 1, other) for other in others for _ in range(other.groups)
        ]
        wanted.append((max(bundle.get(resource, 0) for bundle in bundles), 0, None))
        held: list[PlacementGroup] = []
        deadline = time.monotonic() + self.timeout_s
        try:
            for _, _, other in sorted(wanted, key=lambda piece: piece[:2], reverse=True):
                if other is None:
                    strategy = "PACK" if any(bundle.get(resource, 0) for bundle in bundles) else "SPREAD"
                    self._group = placement_group(bundles, strategy=strategy)
                    await self._until_ready(self._group, deadline, arithmetic)
                else:
                    held.append(placement_group([dict(other.bundle)] * other.bundles, strategy="STRICT_PACK"))
                    await self._until_ready(held[-1], deadline, arithmetic)
        except BaseException:
            self.release()
            raise
        finally:
            for group in held:
                _remove(group)
            # verl checks at its start whether these resources are free, and fails at once if they are not.
            await asyncio.to_thread(_wait_until_removed, held)

    async def _until_ready(self, group: PlacementGroup, deadline: float, arithmetic: str) -> None:
        while (left := deadline - time.monotonic()) > 0:
            if await asyncio.to_thread(group.wait, math.ceil(min(_PROGRESS_S, left))):
                return
            logger.info("the reward model servers wait for free resources in Ray. %s", arithmetic)
        raise ServerStartError(
            f"Ray did not have enough free resources for the reward model servers within {self.timeout_s:g} s "
            f"(placement_timeout_s). {arithmetic}. {self.fix}"
        )

    def _arithmetic(self, demands: Sequence[Demand], others: Sequence[Others], nodes: list[_Node]) -> str:
        """Return a message with the requested resources and those of each node.

        Raises:
            ConfigError: the cluster is too small, even if it is idle.
        """
        resource = self.accelerator.resource
        pieces = [
            (demand.servers, {"CPU": demand.cpus, resource: demand.gpus}, "reward model server(s)")
            for demand in demands
        ] + [
            (other.groups, {name: other.bundles * count for name, count in other.bundle.items()}, other.name)
            for other in others
        ]
        asked = ", ".join(f"{count} {what} of {_amounts(each, resource)}" for count, each, what in pieces)
        there = "; ".join(node.describe(resource) for node in nodes)
        message = f"Needed, each on one node: {asked}. Nodes: {there or 'none'}"
        if not any(node.total.get(resource) for node in nodes):
            message += f". Ray found no {resource} on any node"
        if not any(demand.gpus for demand in demands):
            message += ". The servers' engine runs on the CPU"
        for name in (resource, "CPU"):
            needed = sum(count * each.get(name, 0) for count, each, _ in pieces)
            largest = max(each.get(name, 0) for _, each, _ in pieces)
            total = sum(node.total.get(name, 0) for node in nodes)
            on_one = max((node.total.get(name, 0) for node in nodes), default=0)
            if needed > total or largest > on_one:
                raise ConfigError(
                    f"Ray has too few {name}s for the reward model servers: {needed:g} are needed, {largest:g} of them "
                    f"on one node, and there are {total:g}, {on_one:g} on the largest node. {message}. {self.fix}"
                )
        return message


@dataclass(frozen=True, slots=True)
class _Node:
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float] | None
    """``None`` if Ray does not report it."""

    def describe(self, resource: str) -> str:
        amounts = [
            f"{self.total.get(name, 0):g} {name}(s)"
            if self.free is None
            else f"{self.free.get(name, 0):g} of {self.total.get(name, 0):g} {name}(s) free"
            for name in (resource, "CPU")
        ]
        return f"{self.address} has {', '.join(amounts)}"


def _nodes() -> list[_Node]:
    try:
        # Not documented, but verl uses it too. Ray documents only the sum over all nodes.
        free = ray._private.state.available_resources_per_node()
    except (AttributeError, RayError):
        free = {}
    return [
        _Node(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"]))
        for node in ray.nodes()
        if node["Alive"]
    ]


def _amounts(each: Mapping[str, float], resource: str) -> str:
    return " and ".join(f"{each.get(name, 0):g} {name}(s)" for name in (resource, "CPU"))


def _wait_until_removed(groups: Sequence[PlacementGroup]) -> None:
    """Wait up to 10 s until Ray has removed the groups and freed their resources."""
    deadline = time.monotonic() + _REMOVED_WITHIN_S
    for group in groups:
        while ray.util.placement_group_table(group).get("state") != "REMOVED" and time.monotonic() < deadline:
            time.sleep(_REMOVED_POLL_S)  # Ray has no event for the removal.


def _remove(group: PlacementGroup) -> None:
    with contextlib.suppress(RayError):
        remove_placement_group(group)
