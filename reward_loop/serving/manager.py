"""Serves reward models at one address: runs their servers and a router, and restarts processes that die."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import logging
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlencode, urlsplit

import aiohttp

from reward_loop._util.api_keys import api_key_of
from reward_loop._util.event_loops import in_background
from reward_loop._util.web_server import listen, url_of
from reward_loop.errors import ConfigError
from reward_loop.router.config import API_KEY_VARIABLE, WORKER_API_KEY_VARIABLE, BackendConfig, SharedRouterOptions
from reward_loop.serving.models import served_models
from reward_loop.serving.options import RewardModelConfig, ServedModelConfig
from reward_loop.serving.process import ServerProcess
from reward_loop.serving.server_spec import Launch, ServerSpec, on_this_machine, server_specs
from reward_loop.serving.supervisor import Supervisor

if TYPE_CHECKING:
    from reward_loop.serving.ray_server import GpuReservation
    from reward_loop.serving.supervisor import Server

logger = logging.getLogger(__name__)

_ROUTER_STARTS_WITHIN_S = 300.0
"""Seconds within which the router must be ready. It loads no model, so `start_timeout_s` does not apply."""
_ROUTER_STOPS_WITHIN_S = 1.0
"""Seconds that the router may take to stop before the servers are stopped, too."""
_REPORTED_WITHIN_S = 15.0
"""Timeout of requests whose failure is only logged. The router may be slow to answer while models load and use all CPU
cores. If the request that adds a server times out, the server gets no requests."""


class ModelServer:
    """The address of one server; reports its deaths to the router.

    The methods ``on_...`` are the supervisor's callbacks.

    Args:
        model: the configuration of its model.
        url: ``None`` until the address is known: in Ray, until the server is ready for the first time.
        router: the client of the router.
    """

    def __init__(self, model: ServedModelConfig, url: str | None, router: RouterClient) -> None:
        self.model = model
        self.url = url
        self._router = router

    def config(self) -> BackendConfig:
        """Return the router's configuration of this server."""
        return BackendConfig(
            url=self.url or "",
            models=(self.model.served_model_name,) if self.model.served_model_name else (),
            kind=None if self.model.kind == "auto" else self.model.kind,
            engine=self.model.engine,
        )

    async def on_up(self, url: str) -> None:
        """Send a new URL to the router."""
        if url == self.url:
            return
        before, self.url = self.url, url
        # First the new one: without any server, the router would refuse the requests that wait.
        await self._router.report("POST", "/workers", self.config().model_dump())
        if before:
            await self._router.report("DELETE", f"/workers?{urlencode({'url': before})}")

    async def on_down(self, reason: str) -> None:
        """Report to the router that the server has died."""
        if self.url is not None:
            await self._router.report("POST", f"/workers/mark_dead?{urlencode({'url': self.url, 'reason': reason})}")


class RouterClient:
    """Sends requests to the control plane of a running router, once it is ready.

    Args:
        url: the router's URL.
        started: done when the router is ready for the first time.
    """

    def __init__(self, url: str, started: asyncio.Future[None]) -> None:
        self._url = url
        self._started = started

    async def report(self, method: str, path: str, body: Any = None) -> None:
        """Change a server. A failure is only logged: the router's health checks detect the state of a server."""
        try:
            await self._request(method, path, body, _REPORTED_WITHIN_S)
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("the router did not confirm %s %s: %r", method, path, error)

    async def hung(self) -> list[str]:
        """Wait until servers are hung, and return their URLs.

        Raises:
            aiohttp.ClientError: the router is not reachable.
        """
        urls: list[str] = await self._request("POST", "/workers/hung", None, None)  # a server may never hang
        return urls

    async def _request(self, method: str, path: str, body: Any, within_s: float | None) -> Any:
        # Shielded: the cancellation of this wait would cancel the supervisor's future.
        await asyncio.shield(self._started)
        timeout = aiohttp.ClientTimeout(total=within_s)
        async with (
            aiohttp.ClientSession(
                self._url, timeout=timeout, headers=_authorization(), raise_for_status=True
            ) as session,
            session.request(method, path, json=body or {}) as response,
        ):
            return await response.json()


def _authorization() -> dict[str, str]:
    key = api_key_of(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


class RewardModelManager:
    """Runs the servers of reward models and a router, each in its own process, while the context is open.

        async with RewardModelManager(RewardModelConfig(model_path="...")) as models:
            address = models.reward_router_address

    Entry waits until all processes are ready. A process that dies is restarted at once, and after a pause that grows
    with each further restart; its address stays the same unless it runs in Ray. In the meantime, requests go to the
    other servers, or wait. After exit, all processes are gone. If this process is killed, they are killed, too.

    Synchronous programs use :func:`serve_reward_model`.

    Args:
        config: the models and how to serve them.
        gpus: for the placement ``ray``, the reservation of GPUs (``GpuReservation``); by default, any free GPUs in Ray.
        trusted_addresses: see `RouterConfig.trusted_addresses`.

    Raises:
        ConfigError: on entry, if there is no model at `model_path`, its kind differs from the configured kind, an
            option is not valid for the engine, the port is in use, there are too few GPUs, or the placement is
            ``colocated``.
        ServerStartError: on entry, if Ray did not have enough free resources in time, or a server or the router did not
            become ready. The message shows the end of its log.
    """

    def __init__(
        self, config: RewardModelConfig, gpus: GpuReservation | None = None, *, trusted_addresses: Sequence[str] = ()
    ) -> None:
        self._config = config
        self._gpus = gpus
        self._trusted_addresses = trusted_addresses
        self._server_key = api_key_of(WORKER_API_KEY_VARIABLE)
        """The key that the router sends to the servers; generated for servers in Ray."""
        self._starts = asyncio.Semaphore(config.starts_at_a_time)
        self._supervisors: dict[str, Supervisor] = {}
        self._router_url = ""
        self._servers: list[ModelServer] = []
        self._restarting: asyncio.Task[None] | None = None
        """Restarts hung servers."""

    @property
    def reward_router_address(self) -> str:
        """The router's ``host:port``."""
        return urlsplit(self._router_url).netloc

    def pids(self) -> dict[str, int]:
        """Return the ids of the running processes, by role: ``router``, ``server 1``, ``server 2`` and so on."""
        return {role: supervisor.pid for role, supervisor in self._supervisors.items() if supervisor.pid}

    async def __aenter__(self) -> Self:
        # served_models reads files and may download from the Hugging Face hub.
        models = await asyncio.to_thread(served_models, self._config)
        if any(model.placement == "colocated" for model in models):
            raise ConfigError(
                "placement='colocated' is only for verl runs, which start the servers on the "
                "trainer's GPUs; set placement='local' or 'ray'"
            )
        try:
            await self._start(models)
            await asyncio.gather(*(supervisor.started for supervisor in self._supervisors.values()))
        # A cancellation, too: a start that is cut off must not leave processes.
        except BaseException:
            await self.stop()
            raise
        names = ", ".join(model.served_model_name or str(model.urls) for model in models)
        logger.info("reward model %s is ready at %s", names, self.reward_router_address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop every process, and wait until all are gone. Called on exit; a second call does nothing."""
        supervisors, self._supervisors = self._supervisors, {}
        stopping: list[asyncio.Task[None]] = []
        if self._restarting:
            self._restarting.cancel()
            stopping.append(self._restarting)
        try:
            # First the router, which would wait for responses of servers that are gone.
            if router := supervisors.pop("router", None):
                stopping.append(asyncio.create_task(router.stop()))
                await asyncio.wait(stopping[-1:], timeout=_ROUTER_STOPS_WITHIN_S)
        # Also if this stop is cancelled, for example by a second Ctrl-C: the servers must stop, and free their GPUs.
        finally:
            try:
                # With return_exceptions, a cancelled gather also waits until all have ended.
                stopping += [asyncio.create_task(server.stop()) for server in supervisors.values()]
                await asyncio.gather(*stopping, return_exceptions=True)
            finally:
                # After the servers: Ray kills the actors of a placement group that is removed.
                if self._gpus:
                    self._gpus.release()

    async def _start(self, models: list[ServedModelConfig]) -> None:
        config = self._config
        log_dir = _log_folder(config.log_dir)
        specs = server_specs(models, log_dir)
        launches = await self._launches(specs)
        logger.info("starting %d reward model server(s); logs are in %s", sum(map(len, specs)), log_dir)
        listener = self._listen()
        self._router_url = url_of(listener)
        supervisor = self._supervise("router", lambda: self._router_process(listener, log_dir), bound=listener)
        router = RouterClient(self._router_url, supervisor.started)
        for model in models:
            self._servers += [ModelServer(model, url, router) for url in model.urls]
        supervised: dict[ModelServer, Supervisor] = {}
        for launch in launches:
            server = ModelServer(launch.spec.model, url_of(launch.bound) if launch.bound else None, router)
            self._servers.append(server)
            supervised[server] = self._supervise(
                f"server {launch.spec.number}",
                launch.new_process,
                bound=launch.bound,
                starts=self._starts,
                on_up=server.on_up,
                on_down=server.on_down,
            )
        # Only now: the command line of the router contains all servers that have an address.
        for supervisor in self._supervisors.values():
            supervisor.start()
        self._restarting = asyncio.create_task(self._restart_hung(router, supervised), name="restart-hung-servers")

    async def _restart_hung(self, router: RouterClient, supervised: dict[ModelServer, Supervisor]) -> None:
        while True:
            with suppress(aiohttp.ClientError):  # the router restarts
                hung = await router.hung()
                for server, supervisor in supervised.items():
                    if server.url in hung:
                        supervisor.restart("hung: it answers no request, not even one of one token")
            # A server is hung until it has ended, or for ever if someone else runs it.
            await asyncio.sleep(self._config.health_interval_s)

    async def _launches(self, specs: list[list[ServerSpec]]) -> Iterable[Launch]:
        local = [servers for servers in specs if servers[0].model.placement == "local"]
        elsewhere = [servers for servers in specs if servers[0].model.placement == "ray"]
        if not elsewhere:
            return on_this_machine(local)
        # Imported only if Ray is used.
        from reward_loop.serving.ray_server import GpuReservation, in_ray

        self._gpus = self._gpus or GpuReservation(timeout_s=self._config.placement_timeout_s)
        self._server_key = self._server_key or secrets.token_urlsafe(24)
        return itertools.chain(on_this_machine(local), await in_ray(elsewhere, self._gpus, self._server_key))

    def _supervise(self, role: str, new_process: Callable[[], Server], **options: Any) -> Supervisor:
        supervisor = self._supervisors[role] = Supervisor(new_process, **options)
        return supervisor

    def _listen(self) -> socket.socket:
        host, port = self._config.host, self._config.router_port
        try:
            return listen(host, port or 0)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port:
                raise ConfigError(f"router_port={port}: the port is in use on {host}; choose another one") from error
            raise ConfigError(f"host={host!r}, router_port={port}: cannot listen there: {error}") from error

    def _router_process(self, listener: socket.socket, log_dir: Path) -> ServerProcess:
        return ServerProcess(
            "reward router",
            self._router_command(),
            bound=listener,
            log_path=log_dir / "router.log",
            # Not in the command line, which other users of the machine can read.
            env={WORKER_API_KEY_VARIABLE: self._server_key} if self._server_key else {},
            # Its /health depends on the servers, which may not be ready yet.
            health_path="/live",
            start_timeout_s=_ROUTER_STARTS_WITHIN_S,
        )

    def _router_command(self) -> list[str]:
        shared = {"policy", *SharedRouterOptions.model_fields}
        given = {**self._config.model_dump(include=shared), "trusted_addresses": self._trusted_addresses}
        # The router's explanation should arrive before the client's own timeout, as with both defaults.
        slowest = max(model.timeout or 0.0 for model in (self._config, *self._config.models.values()))
        given["request_timeout_s"] = max(given["request_timeout_s"], slowest * 290 / 300)
        options = ["--options", json.dumps(given)]
        for server in self._servers:
            if server.url:
                options += ["--worker", server.config().model_dump_json()]
        return [sys.executable, "-m", "reward_loop.router.app", *options]


def _log_folder(log_dir: str | None) -> Path:
    """Return the folder for the logs of servers: a new temporary one if the user has named none."""
    try:
        folder = Path(log_dir or tempfile.mkdtemp(prefix="reward_loop-")).absolute()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"log_dir={log_dir!r}: {error}. Set log_dir to a folder for the logs of servers") from error
    return folder


@contextmanager
def serve_reward_model(
    config: RewardModelConfig, gpus: GpuReservation | None = None, *, trusted_addresses: Sequence[str] = ()
) -> Iterator[RewardModelManager]:
    """Run a :class:`RewardModelManager` on an event loop in a background thread, for synchronous programs.

        with serve_reward_model(RewardModelConfig(model_path="...")) as models:
            train(reward_router_address=models.reward_router_address)

    The processes are stopped when the block ends, or when the interpreter exits inside the block.

    Args:
        config, gpus, trusted_addresses: as for :class:`RewardModelManager`.

    Yields:
        the manager, once all processes are ready. Its address and `pids` may be read from any thread.

    Raises:
        ConfigError, ServerStartError: as on entry of :class:`RewardModelManager`.
    """

    def manager() -> RewardModelManager:
        return RewardModelManager(config, gpus, trusted_addresses=trusted_addresses)

    with in_background(manager, name="reward-model-manager") as running:
        yield running
