"""A server in a Ray actor that reserves its GPUs, on any node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from reward_loop.errors import ConfigError, ServerDiedError, ServerError, ServerStartError
from reward_loop.router.servers.process import ServerProcess
from reward_loop.router.sockets import listen, reserve, url_of

__all__ = ["GpuReservation", "RayServer"]

logger = logging.getLogger(__name__)

_STOPS_WITHIN_S = 30.0


class GpuReservation:
    """Placement groups for servers, one each: all GPUs of a server are on one node, and servers are anywhere.

    It outlives the servers' restarts. Ray must have been initialised.
    """

    def __init__(self) -> None:
        self._groups: list[PlacementGroup] = []

    def reserve(self, gpus: int, cpus: int) -> PlacementGroup:
        """A placement group for one server; it may still have to wait for its resources.

        Raises:
            ConfigError: no node has so many GPUs.
        """
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

    def release(self) -> None:
        """Gives everything back."""
        while self._groups:
            with contextlib.suppress(RayError):
                remove_placement_group(self._groups.pop())


class RayServer:
    """One run of a server, like :class:`ServerProcess`, in an actor of its own.

    The server ends with the actor, and the actor with the process that has started it. Its URL is known once it has
    been entered, and may differ from that of the run before.

    Args:
        name: what messages call it.
        command: the command line for a host and a port.
        inherits_socket: whether the command takes ``--fd`` and ``--lifeline-fd``.
        group: where it runs.
        gpus, cpus: what it takes of the group.
        env, health_path, start_timeout_s: as in :class:`ServerProcess`.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[str, int], list[str]],
        *,
        inherits_socket: bool,
        group: PlacementGroup,
        gpus: int,
        cpus: int,
        env: dict[str, str],
        health_path: str = "/health",
        start_timeout_s: float = 600.0,
    ) -> None:
        self.name = name
        self.url = ""
        self.pid: int | None = None
        self.started_in_s: float | None = None
        self._command = command
        self._options = {"env": env, "health_path": health_path, "start_timeout_s": start_timeout_s}
        self._inherits_socket = inherits_socket
        self._group = group
        self._gpus, self._cpus = gpus, cpus
        self._start_timeout_s = start_timeout_s
        self._actor: Any = None

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._until_reserved()
                host: Any = _Host
                self._actor = host.options(
                    num_cpus=self._cpus,
                    num_gpus=self._gpus,
                    max_concurrency=4,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group),
                ).remote()
                self.url, self.pid, self.started_in_s = await self._actor.start.remote(
                    self.name, self._command, self._inherits_socket, self._options
                )
        except TimeoutError:
            what = (
                "was not ready"
                if self._actor
                else f"found no node with {self._gpus} GPU(s) and {self._cpus} CPU(s) free"
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
        ready = asyncio.ensure_future(asyncio.wrap_future(self._group.ready().future()))
        while not (await asyncio.wait([ready], timeout=15))[0]:
            logger.info("%s waits for %d GPU(s) and %d CPU(s) in Ray", self.name, self._gpus, self._cpus)
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
        self, name: str, command: Callable[[str, int], list[str]], inherits_socket: bool, options: dict[str, Any]
    ) -> tuple[str, int | None, float | None]:
        host = ray.util.get_node_ip_address()
        bound = self._stack.enter_context(listen(host) if inherits_socket else reserve(host))
        port = bound.getsockname()[1]
        log_dir = Path(tempfile.mkdtemp(prefix="reward_loop-"))
        process = ServerProcess(
            f"{name} on {host}", command(host, port), bound=bound, log_path=log_dir / "server.log", **options
        )
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
