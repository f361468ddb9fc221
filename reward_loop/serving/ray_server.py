"""A server in a Ray actor, on any node: on GPUs that it reserves, or on those that it shares."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from reward_loop._util.sockets import listen, reserve, url_of
from reward_loop.errors import ConfigError, ServerDiedError, ServerError, ServerStartError
from reward_loop.serving.gpus import CUDA_VISIBLE_DEVICES
from reward_loop.serving.process import ServerProcess

__all__ = ["GpuReservation", "Place", "RayServer", "SharedGpus"]

logger = logging.getLogger(__name__)

_STOPS_WITHIN_S = 30.0

_A_LITTLE_OF_A_GPU = 0.01
"""What a question for a bundle's GPU takes of it: the rest is in use."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in Ray a server runs, and on how many GPUs and processors."""

    group: PlacementGroup
    gpus: int
    cpus: int
    shared: tuple[int, ...] = ()
    """The bundles whose GPUs it uses while others hold them; none if it takes its GPUs and processors itself."""

    @property
    def resources(self) -> dict[str, Any]:
        """The options of an actor there."""
        if not self.shared:
            return _in_bundle(self.group, -1, num_gpus=self.gpus, num_cpus=self.cpus)
        return _in_bundle(self.group, self.shared[0], num_gpus=0, num_cpus=0)

    async def environment(self) -> dict[str, str]:
        """The environment variables that say which GPUs these are. Ray says it itself to who holds them."""
        if not self.shared or not self.gpus:
            return {}
        ask: Any = _held_gpus
        options = {"num_gpus": _A_LITTLE_OF_A_GPU, "num_cpus": 0}
        held = await asyncio.gather(
            *(ask.options(**_in_bundle(self.group, bundle, **options)).remote() for bundle in self.shared)
        )
        return {CUDA_VISIBLE_DEVICES: ",".join(gpu for gpus in held for gpu in gpus)}


def _in_bundle(group: PlacementGroup, index: int, **resources: float) -> dict[str, Any]:
    return {**resources, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index)}


@ray.remote
def _held_gpus() -> list[str]:
    return ray.get_runtime_context().get_accelerator_ids()["GPU"]


class GpuReservation:
    """Placement groups for servers, one each: all GPUs of a server are on one node, and servers are anywhere.

    It outlives the servers' restarts. Ray must have been initialised.
    """

    def __init__(self) -> None:
        self._groups: list[PlacementGroup] = []

    def places(self, servers: int, gpus: int, cpus: int) -> Iterator[Place]:
        """A placement group for each of a model's servers; they may still have to wait for their resources.

        Raises:
            ConfigError: no node has so many GPUs.
        """
        for _ in range(servers):
            yield Place(self._reserve(gpus, cpus), gpus, cpus)

    def release(self) -> None:
        """Gives everything back."""
        while self._groups:
            with contextlib.suppress(RayError):
                remove_placement_group(self._groups.pop())

    def _reserve(self, gpus: int, cpus: int) -> PlacementGroup:
        if not ray.is_initialized():
            raise ConfigError("placement='ray': Ray is not initialised; call ray.init() first")
        bundle: dict[str, float] = {"CPU": cpus}
        if gpus:
            bundle["GPU"] = gpus
            largest = max((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
            if gpus > largest:
                raise ConfigError(
                    f"a server needs {gpus} GPUs on one node, and the largest node has {largest}: lower "
                    "tensor_parallel_size or data_parallel_size"
                )
        group = placement_group([bundle], strategy="STRICT_PACK", name="reward_model_server")
        self._groups.append(group)
        return group


class SharedGpus:
    """GPUs that others hold, and that servers use beside them.

    Args:
        groups: placement groups of the others, on one node each, with a GPU in each bundle.
    """

    def __init__(self, groups: Sequence[PlacementGroup]) -> None:
        self._groups = list(groups)

    def places(self, servers: int, gpus: int, cpus: int) -> Iterator[Place]:
        """Bundles for each of a model's servers, all of a server's on one node. Every model begins with the first one:
        models share GPUs, too.

        Raises:
            ConfigError: there are too few.
        """
        size = max(1, gpus)  # One without a GPU has a bundle as its place, too.
        slots = [
            (group, tuple(range(first, first + size)))
            for group in self._groups
            for first in range(0, group.bundle_count - size + 1, size)
        ]
        if servers > len(slots):
            counts = ", ".join(str(group.bundle_count) for group in self._groups)
            raise ConfigError(
                f"{servers} server(s) of {size} GPU(s), each on one node, do not fit on the GPUs that they share "
                f"({counts} a node): lower replicas, tensor_parallel_size or data_parallel_size"
            )
        for group, bundles in slots[:servers]:
            yield Place(group, gpus, cpus, bundles)

    def release(self) -> None:
        """They are the others'."""


class RayServer:
    """One run of a server, like :class:`ServerProcess`, in an actor of its own.

    The server ends with the actor, and the actor with the process that has started it. Its URL is known once it has
    been entered, and may differ from that of the run before.

    Args:
        name: what messages call it.
        command: the command line for a host and a port.
        inherits_socket: whether the command takes ``--fd`` and ``--lifeline-fd``.
        place: where it runs.
        env, health_path, start_timeout_s: as in :class:`ServerProcess`.
        log_path: the server's log, on its node; by default in a new temporary directory.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[str, int], list[str]],
        *,
        inherits_socket: bool,
        place: Place,
        env: dict[str, str],
        health_path: str = "/health",
        start_timeout_s: float = 600.0,
        log_path: Path | None = None,
    ) -> None:
        self.name = name
        self.url = ""
        self.pid: int | None = None
        self.started_in_s: float | None = None
        self._command = command
        self._env = env
        self._log_path = log_path
        self._options = {"health_path": health_path, "start_timeout_s": start_timeout_s}
        self._inherits_socket = inherits_socket
        self._place = place
        self._start_timeout_s = start_timeout_s
        self._actor: Any = None

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._until_reserved()
                env = self._env | await self._place.environment()
                host: Any = _Host
                self._actor = host.options(max_concurrency=4, **self._place.resources).remote()
                self.url, self.pid, self.started_in_s = await self._actor.start.remote(
                    self.name, self._command, self._inherits_socket, self._log_path, {**self._options, "env": env}
                )
        except TimeoutError:
            what = (
                "was not ready"
                if self._actor
                else f"found no node with {self._place.gpus} GPU(s) and {self._place.cpus} CPU(s) free"
            )
            await self._stop()
            raise ServerStartError(f"{self.name} {what} after {self._start_timeout_s:g} s") from None
        except RayError as error:
            await self._stop()
            raise ServerStartError(f"{self.name} cannot be started: {_cause(error)}") from error
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()

    async def wait(self) -> ServerDiedError:
        """Waits until the server ends by itself, or its actor or node dies; returns an error that says how."""
        try:
            return ServerDiedError(await self._actor.wait.remote())
        except RayError as error:
            return ServerDiedError(f"{self.name}: its Ray actor died: {_cause(error)}")

    async def _until_reserved(self) -> None:
        place = self._place
        ready = asyncio.ensure_future(asyncio.wrap_future(place.group.ready().future()))
        while not (await asyncio.wait([ready], timeout=15))[0]:
            logger.info("%s waits for %d GPU(s) and %d CPU(s) in Ray", self.name, place.gpus, place.cpus)
        ready.result()

    async def _stop(self) -> None:
        actor, self._actor = self._actor, None
        if actor is None:
            return
        with anyio.CancelScope(shield=True):
            with contextlib.suppress(RayError, TimeoutError):
                async with asyncio.timeout(_STOPS_WITHIN_S):
                    await actor.stop.remote()
            ray.kill(actor)


@ray.remote
class _Host:
    """Holds one server process on a node."""

    def __init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._process: ServerProcess | None = None

    async def start(
        self,
        name: str,
        command: Callable[[str, int], list[str]],
        inherits_socket: bool,
        log_path: Path | None,
        options: dict[str, Any],
    ) -> tuple[str, int | None, float | None]:
        # The router is elsewhere only where there is an elsewhere.
        nodes = [node for node in ray.nodes() if node["Alive"]]
        host = ray.util.get_node_ip_address() if len(nodes) > 1 else "127.0.0.1"
        bound = self._stack.enter_context(listen(host) if inherits_socket else reserve(host))
        port = bound.getsockname()[1]
        process = ServerProcess(f"{name} on {host}", command(host, port), bound=bound, log_path=log_path, **options)
        self._process = await self._stack.enter_async_context(process)
        return url_of(bound), process.pid, process.started_in_s

    async def wait(self) -> str:
        assert self._process is not None
        return str(await self._process.wait())

    async def stop(self) -> None:
        await self._stack.aclose()


def _cause(error: RayError) -> object:
    """The server's own error, if that is what the actor has raised."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, ServerError) else error
