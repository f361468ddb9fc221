"""Reserve Ray resources for servers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from reward_loop.errors import ConfigError, ServerStartError

_REMOVED_WITHIN_S = 10.0
_REMOVED_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Demand:
    """The resources that the servers of one model need."""

    servers: int
    gpus: int
    """The number of GPUs of each server, all on one node."""
    cpus: int
    """The number of CPU cores of each server."""


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """The Ray resources that one server runs on: a bundle of a placement group, with its GPUs and CPU cores."""

    group: PlacementGroup
    bundle: int
    gpus: int
    cpus: int

    @property
    def resources(self) -> dict[str, Any]:
        """The options of a Ray actor that runs here."""
        strategy = PlacementGroupSchedulingStrategy(self.group, self.bundle)
        return {"num_gpus": self.gpus, "num_cpus": self.cpus, "scheduling_strategy": strategy}


@dataclass(eq=False)
class GpuReservation:
    """Reserves Ray resources for all servers in one placement group.

    - All GPUs of a server are on one node. The servers are on as few nodes as possible; if that would split a node that
      `others` need, on several. Servers without GPUs are spread over the nodes.
    - The reservation is kept when servers restart, until :meth:`release`.
    - Ray must be initialised.
    """

    others: Sequence[int] = ()
    """The GPUs of each placement group that another component, such as a trainer, will create, each on one node. verl
    waits for them without a deadline."""
    _: KW_ONLY
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
        bundles = [
            {"CPU": float(demand.cpus), **({"GPU": float(demand.gpus)} if demand.gpus else {})}
            for demand in demands
            for _ in range(demand.servers)
        ]
        if not bundles:
            return []
        try:
            await self._reserve(bundles)
        except BaseException:
            self.release()
            raise
        group, numbers = self._group, iter(range(len(bundles)))
        assert group is not None
        return [
            [GpuPlace(group, next(numbers), demand.gpus, demand.cpus) for _ in range(demand.servers)]
            for demand in demands
        ]

    def release(self) -> None:
        """Release all reserved resources."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(group)

    async def _reserve(self, bundles: list[dict[str, float]]) -> None:
        needs_gpus = any("GPU" in bundle for bundle in bundles)
        others = self.others if needs_gpus else ()  # servers without GPUs do not compete with them
        self._check_sums(bundles, others)
        deadline = time.monotonic() + self.timeout_s
        for strategy in ("PACK", "SPREAD") if needs_gpus else ("SPREAD",):
            self._group = group = placement_group(bundles, strategy=strategy)
            if not await asyncio.to_thread(group.wait, max(0.0, deadline - time.monotonic())):
                raise ServerStartError(
                    f"Ray did not have enough free resources for the reward model servers within {self.timeout_s:g} s "
                    f"(placement_timeout_s): {_asked(bundles, others)}. Nodes: {_described()}. {self.fix}"
                )
            if _fit(_left(group, bundles), others):
                return
            self.release()
            await asyncio.to_thread(_wait_until_removed, group)
        raise ConfigError(
            f"Ray's nodes have no room for the reward model servers beside the trainer: {_asked(bundles, others)}. "
            f"Nodes: {_described()}. {self.fix}"
        )

    def _check_sums(self, bundles: list[dict[str, float]], others: Sequence[int]) -> None:
        """Raise a `ConfigError` if the cluster is too small, even if it is idle."""
        for name in ("GPU", "CPU"):
            pieces = [bundle.get(name, 0) for bundle in bundles] + (list(map(float, others)) if name == "GPU" else [])
            totals = [node["Resources"].get(name, 0) for node in _nodes()]
            if sum(pieces) > sum(totals) or max(pieces) > max(totals, default=0):
                raise ConfigError(
                    f"Ray has too few {name}s for the reward model servers: {sum(pieces):g} are needed, "
                    f"{max(pieces):g} of them on one node, and there are {sum(totals):g}, {max(totals, default=0):g} "
                    f"on the largest node. {_asked(bundles, others)}. Nodes: {_described()}. {self.fix}"
                )


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _asked(bundles: Iterable[dict[str, float]], others: Sequence[int]) -> str:
    sizes = sorted({(bundle.get("GPU", 0), bundle["CPU"]) for bundle in bundles})
    count = len(list(bundles))
    servers = f"{count} server(s) with {', '.join(f'{gpus:g} GPU(s) and {cpus:g} CPU(s)' for gpus, cpus in sizes)}"
    return servers + (f", and groups of the trainer with {', '.join(map(str, others))} GPU(s)" if others else "")


def _described() -> str:
    return "; ".join(
        f"{node['NodeManagerAddress']} has {node['Resources'].get('GPU', 0):g} GPU(s) and "
        f"{node['Resources'].get('CPU', 0):g} CPU(s)"
        for node in _nodes()
    )


def _left(group: PlacementGroup, bundles: Sequence[dict[str, float]]) -> list[float]:
    """Return the GPUs of each node that are not in the group."""
    left = {node["NodeID"]: node["Resources"].get("GPU", 0.0) for node in _nodes()}
    for number, node in placement_group_table(group)["bundles_to_node_id"].items():
        left[node] -= bundles[number].get("GPU", 0.0)
    return list(left.values())


def _fit(free: list[float], groups: Sequence[int]) -> bool:
    """Return whether groups of GPUs, each on one node, fit into the nodes: the largest first, where it fits best."""
    for size in sorted(groups, reverse=True):
        rooms = [number for number, gpus in enumerate(free) if gpus >= size]
        if not rooms:
            return False
        free[min(rooms, key=free.__getitem__)] -= size
    return True


def _wait_until_removed(group: PlacementGroup) -> None:
    """Wait up to 10 s until Ray has removed a group and freed its resources."""
    deadline = time.monotonic() + _REMOVED_WITHIN_S
    while placement_group_table(group).get("state") != "REMOVED" and time.monotonic() < deadline:
        time.sleep(_REMOVED_POLL_S)  # Ray has no event for the removal.
