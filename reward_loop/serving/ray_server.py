"""Reserves Ray resources for servers, and runs a server in a Ray actor on any node.

On the router's node, it listens on loopback; elsewhere on the address of its node. It asks for the key of the run,
which the router adds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Self

import anyio
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from reward_loop.errors import ConfigError, ServerDiedError, ServerError, ServerStartError
from reward_loop.serving.process import ServerProcess
from reward_loop.serving.server_spec import LOOPBACK, VISIBLE_DEVICES, Launch, ServerSpec

logger = logging.getLogger(__name__)

_PLACED_WITHIN_S = 600.0
"""Seconds that the actor of a server may take to start: after the loss of a node, until Ray finds another place."""
_STOPS_WITHIN_S = 30.0
"""Seconds that the actor may take to stop the server: longer than a `ServerProcess` waits before SIGKILL."""
_EXTRA_START_S = 60.0
"""Seconds for what a start needs in addition to `start_timeout_s` of the server's process: the stop of a process that
was not ready in time."""


_REMOVED_WITHIN_S = 10.0
_REMOVED_POLL_S = 0.05


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

    async def places(self, demands: Sequence[tuple[int, int]]) -> list[GpuPlace]:
        """Reserve the resources of all servers, and return the place of each.

        Args:
            demands: the number of GPUs, all on one node, and of CPU cores of each server.

        Raises:
            ConfigError: Ray is not initialised, or the groups of `others` have no room beside the servers.
            ServerStartError: the resources did not become free in time.
        """
        if not ray.is_initialized():
            raise ConfigError("placement='ray': Ray is not initialised; call ray.init() first")
        bundles = [{"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})} for gpus, cpus in demands]
        try:
            await self._reserve(bundles)
        except BaseException:
            self.release()
            raise
        assert self._group is not None
        return [GpuPlace(self._group, number, *demand) for number, demand in enumerate(demands)]

    def release(self) -> None:
        """Release all reserved resources."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(group)

    async def _reserve(self, bundles: list[dict[str, float]]) -> None:
        needs_gpus = any("GPU" in bundle for bundle in bundles)
        others = self.others if needs_gpus else ()  # servers without GPUs do not compete with them
        deadline = time.monotonic() + self.timeout_s
        for strategy in ("PACK", "SPREAD") if needs_gpus else ("SPREAD",):
            self._group = group = placement_group(bundles, strategy=strategy)
            if not await asyncio.to_thread(group.wait, max(0.0, deadline - time.monotonic())):
                raise ServerStartError(
                    f"Ray did not have enough free resources for the reward model servers within {self.timeout_s:g} s "
                    f"(placement_timeout_s): {_described(bundles, others)}. {self.fix}"
                )
            if _fit(_left(group, bundles), others):
                return
            self.release()
            await asyncio.to_thread(_wait_until_removed, group)
        raise ConfigError(
            "Ray's nodes have no room for the reward model servers beside the trainer: "
            f"{_described(bundles, others)}. {self.fix}"
        )


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _described(bundles: Sequence[dict[str, float]], others: Sequence[int]) -> str:
    nodes = [{name: node["Resources"].get(name, 0.0) for name in ("GPU", "CPU")} for node in _nodes()]
    return f"the servers need {bundles}, the trainer groups with {list(others)} GPUs, and the nodes have {nodes}"


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


async def in_ray(specs: Sequence[Sequence[ServerSpec]], placement: GpuReservation, api_key: str) -> list[Launch]:
    """Return the servers of each model as Ray actors, which ask for an API key.

    Raises:
        ConfigError, ServerStartError: there are too few resources.
    """
    servers = [spec for of_model in specs for spec in of_model]
    places = await placement.places([(spec.gpus, spec.model.threads) for spec in servers])
    return [Launch(spec, partial(RayServer, spec, place, api_key)) for spec, place in zip(servers, places, strict=True)]


class RayServer:
    """One run of a server in its own Ray actor, with the interface of :class:`ServerProcess`.

    The server stops with the actor, and the actor stops with the process that created it. `url` is set on entry, and
    may differ from the URL of the previous run.

    If the node of the server is lost, Ray moves the place of the server to another node when one has the resources:
    :meth:`placed` waits for it.

    Args:
        spec: the server.
        place: the Ray resources that the server runs on.
        api_key: the key that the server asks for.

    Entering raises:
        ServerStartError: the server cannot be started, or is not ready in time. The message shows the end of its log.
    """

    def __init__(self, spec: ServerSpec, place: GpuPlace, api_key: str) -> None:
        self.name = spec.name
        self.url = ""
        self.pid: int | None = None
        self.started_in_s: float | None = None
        self._spec = spec
        self._place = place
        self._api_key = api_key
        self._start_timeout_s = spec.model.start_timeout_s
        self._actor: Any = None

    @asynccontextmanager
    async def placed(self) -> AsyncIterator[None]:
        """Run the actor of the server. Entry waits until Ray has started it.

        Raises:
            ServerStartError: the resources were not free in time, or the actor died.
        """
        host: Any = _Host
        self._actor = host.options(max_concurrency=4, **self._place.resources).remote()
        try:
            async with self._errors("had no place in Ray", _PLACED_WITHIN_S):
                await self._actor.__ray_ready__.remote()
            yield
        finally:
            # Frees the place, for the actor of the next run.
            ray.kill(self._actor)

    async def __aenter__(self) -> Self:
        try:
            # The deadline of the process ends first, and its error shows the end of the log.
            async with self._errors("was not started by its Ray actor", self._start_timeout_s + _EXTRA_START_S):
                await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    @asynccontextmanager
    async def _errors(self, timed_out: str, timeout_s: float) -> AsyncIterator[None]:
        """Limit the time of the block, and turn its errors into `ServerStartError`."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise ServerStartError(f"{self.name} {timed_out} after {timeout_s:g} s") from None
        except RayError as error:
            raise ServerStartError(f"{self.name} cannot be started: {_cause(error)}") from error

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def wait(self) -> ServerDiedError:
        """Wait until the server exits by itself, or its actor or node dies; return an error with the cause."""
        try:
            return ServerDiedError(await self._actor.wait.remote())
        except RayError as error:
            return ServerDiedError(f"{self.name}: its Ray actor died: {_cause(error)}")

    async def _start(self) -> None:
        node = ray.get_runtime_context().get_node_id()
        self.url, self.pid, self.started_in_s = await self._actor.start.remote(self._spec, node, self._api_key)

    async def _stop(self) -> None:
        with anyio.CancelScope(shield=True):
            # If the actor does not answer, `placed` kills it, and the server ends with it.
            with contextlib.suppress(RayError, TimeoutError):
                async with asyncio.timeout(_STOPS_WITHIN_S):
                    await self._actor.stop.remote()


@ray.remote
class _Host:
    """The actor that runs one server process on a node."""

    def __init__(self) -> None:
        # Ray forwards the output of its workers to the program: the progress of a start is logged here.
        logging.basicConfig(format="%(message)s")
        logging.getLogger("reward_loop").setLevel(logging.INFO)
        self._stack = AsyncExitStack()
        self._process: ServerProcess | None = None

    async def start(self, spec: ServerSpec, users_node: str, api_key: str) -> tuple[str, int | None, float | None]:
        """Start the server.

        Args:
            spec, api_key: as for :class:`RayServer`.
            users_node: the id of the node that sends the requests.

        Returns:
            the server's URL, its process id, and the seconds until it was ready.
        """
        context, address = ray.get_runtime_context(), ray.util.get_node_ip_address()
        devices: dict[str, str] = {}
        if spec.gpus and VISIBLE_DEVICES not in spec.model.env:
            # Set here because Ray does not set the variable if a RAY_EXPERIMENTAL_NOSET_... variable forbids it.
            devices = {VISIBLE_DEVICES: ",".join(context.get_accelerator_ids()["GPU"])}
        bound = self._stack.enter_context(spec.bind(LOOPBACK if context.get_node_id() == users_node else address))
        # For vLLM with the option `python`, this starts that interpreter to ask for the version.
        process = await asyncio.to_thread(spec.process, bound, devices, f" on {address}", api_key)
        self._process = await self._stack.enter_async_context(process)
        return process.url, process.pid, process.started_in_s

    async def wait(self) -> str:
        assert self._process is not None
        return str(await self._process.wait())

    async def stop(self) -> None:
        await self._stack.aclose()


def _cause(error: RayError) -> object:
    """Return the server's own error if the actor raised one, else Ray's error."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, ServerError) else error
