"""Serves reward models at one address: runs their servers and a router, and restarts processes that die."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from reward_loop._util.sockets import listen, url_of
from reward_loop.config import RewardModelConfig, ServedModelConfig
from reward_loop.errors import ConfigError
from reward_loop.serving.launch import in_ray, on_this_machine
from reward_loop.serving.logs import log_folder
from reward_loop.serving.model_server import ModelServer
from reward_loop.serving.models import served_models
from reward_loop.serving.process import ServerProcess
from reward_loop.serving.router_client import RouterClient
from reward_loop.serving.supervisor import RestartPolicy, Server, Starts, Supervisor

if TYPE_CHECKING:
    from reward_loop.serving.reservation import Placement

__all__ = ["RewardModelManager"]

logger = logging.getLogger(__name__)

_SLEEPS_WITHIN_S = 120.0
"""Seconds that a server may take to sleep or wake, after its requests in flight have finished."""
_ROUTER_STOPS_WITHIN_S = 1.0
"""Seconds that the router may take to stop before the servers are stopped, too."""


class RewardModelManager:
    """Runs the servers of reward models and a router, each in its own process, while the context is open.

        async with RewardModelManager(RewardModelConfig(model_path="...")) as models:
            address = models.reward_router_address

    Entry waits until all processes are ready. A process that dies is restarted after a pause that grows with each
    restart; its address stays the same unless it runs in Ray. In the meantime, requests go to the other servers, or
    wait. A process that dies more than `max_restarts` times within `restart_window_s` seconds stays down, and an error
    is logged. After exit, all processes are gone. If this process is killed, they are killed, too.

    Entry and exit must happen in the same task. Synchronous programs use :func:`serve_reward_model`.

    Args:
        config: the models and how to serve them.
        gpus: for the placement ``colocated``, the GPUs that the servers share with other actors (``SharedGpus``). A
            server that dies while the models sleep is restarted at :meth:`wake`. For the placement ``ray``, the
            reservation of GPUs (``GpuReservation``); by default, any free GPUs in Ray.

    Entering raises:
        ConfigError: there is no model at `model_path`, its kind differs from the configured kind, an option is not
            valid for the engine, the port is in use, there are too few GPUs, or ``colocated`` has no `gpus`.
        ServerStartError: Ray did not have enough free resources in time; or a server or the router did not become
            ready, and the message shows the end of its log.
    """

    def __init__(self, config: RewardModelConfig, gpus: Placement | None = None) -> None:
        self._config = config
        self._gpus = gpus
        self._starts = Starts(config.starts_at_a_time)
        self._supervisors: dict[str, Supervisor] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._runs: list[asyncio.Task[None]] = []
        self._router_run: asyncio.Task[None] | None = None
        self._resources = ExitStack()
        self._router_url = ""
        self._servers: list[ModelServer] = []

    @property
    def reward_router_address(self) -> str:
        """The router's ``host:port``."""
        return urlsplit(self._router_url).netloc

    def pids(self) -> dict[str, int]:
        """Returns the ids of the running processes, by role: ``router``, ``server 1``, ``server 2`` and so on."""
        return {role: supervisor.pid for role, supervisor in self._supervisors.items() if supervisor.pid}

    async def __aenter__(self) -> Self:
        # served_models reads files and may download from the Hugging Face hub.
        models = await asyncio.to_thread(served_models, self._config)
        if self._config.placement == "colocated" and self._gpus is None:
            raise ConfigError(
                "placement='colocated': servers share the GPUs of a verl run (python -m reward_loop.verl.main_ppo), "
                "and there is none here; set placement='local' or 'ray'"
            )
        try:
            self._tasks = await asyncio.TaskGroup().__aenter__()
            await self._start(models)
            await asyncio.gather(*(supervisor.started for supervisor in self._supervisors.values()))
        except BaseException:
            await self.stop()
            raise
        names = ", ".join(model.served_model_name or str(model.urls) for model in models)
        logger.info("reward model %s is ready at %s", names, self.reward_router_address)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stops every process, and waits until all are gone. Called on exit; a second call does nothing."""
        tasks, self._tasks = self._tasks, None
        try:
            if tasks:
                try:
                    await self._stop_router()
                finally:
                    for run in self._runs:
                        run.cancel()
                    await tasks.__aexit__(None, None, None)
        finally:
            self._resources.close()

    async def _stop_router(self) -> None:
        """Stops the router before its servers; otherwise it would wait for responses of servers that are gone."""
        if self._router_run:
            self._router_run.cancel()
            await asyncio.wait([self._router_run], timeout=_ROUTER_STOPS_WITHIN_S)

    async def sleep(self) -> None:
        """Frees the models' memory: the router holds new requests, requests in flight finish, then the engines sleep.

        External servers keep their memory; they only get no requests.

        Raises:
            ConfigError: a model is served without `enable_sleep_mode`.
            ServerError: the router or a server did not go to sleep.
        """
        for server in self._servers:
            if not server.can_sleep:
                raise ConfigError(f"{server.model.served_model_name}: set enable_sleep_mode=True to put it to sleep")
        if self._config.placement == "colocated":
            # A restarted server would not find free GPU memory while other actors use the GPUs.
            await self._starts.forbid()
        await self._with_each(ModelServer.sleep)

    async def wake(self) -> None:
        """Allocates the models' memory again; the router then sends the requests that it has held.

        Raises:
            ServerError: the router or a server did not wake up.
        """
        await self._with_each(ModelServer.wake)
        await self._starts.allow()

    async def _with_each(self, do: Callable[[ModelServer], Awaitable[None]]) -> None:
        """Calls ``do`` for all servers concurrently; raises the first error after all calls have ended."""
        for error in await asyncio.gather(*map(do, self._servers), return_exceptions=True):
            if error is not None:
                raise error

    async def _start(self, models: list[ServedModelConfig]) -> None:
        config = self._config
        log_dir = log_folder(config.log_dir)
        if config.placement == "local":
            launch = on_this_machine(log_dir, self._resources)
        else:
            launch = await in_ray(config, models, self._gpus, self._resources)
        count = sum(model.replicas for model in models if model.engine != "external")
        logger.info("starting %d reward model server(s); logs are in %s", count, log_dir)
        listener = self._listen(config.host, config.router_port)
        self._router_url = url_of(listener)
        router = RouterClient(
            self._router_url, self._start_router(listener, log_dir), config.request_timeout_s + _SLEEPS_WITHIN_S
        )
        for model in models:
            if model.engine == "external":
                self._servers += [ModelServer(model, url, router) for url in model.urls]
                continue
            for number, launched in enumerate(launch(model), 1):
                role = f"server {len(self._supervisors)}"
                of = f" of {model.served_model_name}" if len(models) > 1 else ""
                server = ModelServer(model, launched.url, router, launched.close)
                self._servers.append(server)
                self._supervise(
                    role,
                    functools.partial(launched.new_process, f"reward model server {number}/{model.replicas}{of}", role),
                    starts=self._starts,
                    on_up=server.on_up,
                    on_down=server.on_down,
                    on_lost=server.on_lost,
                )

    def _start_router(self, listener: socket.socket, log_dir: Path) -> asyncio.Future[None]:
        """Starts to supervise the router; returns the future that is done when the router is ready."""

        def new_process() -> ServerProcess:
            return ServerProcess(
                "reward router",
                self._router_command(),
                bound=listener,
                log_path=log_dir / "router.log",
                # Its /health depends on the servers, which may not be ready yet.
                health_path="/live",
                start_timeout_s=self._config.start_timeout_s,
            )

        async def send_states(_: str) -> None:
            for server in self._servers:
                await server.send_state()

        async def close(_: str) -> None:
            listener.close()

        # Requests to all servers wait for the router, so it restarts at once.
        self._router_run = self._supervise(
            "router", new_process, starts=Starts(1), at_once=True, on_up=send_states, on_lost=close
        )
        return self._supervisors["router"].started

    def _supervise(self, role: str, new_process: Callable[[], Server], **options: Any) -> asyncio.Task[None]:
        assert self._tasks is not None
        policy = RestartPolicy(self._config.max_restarts, self._config.restart_window_s)
        supervisor = Supervisor(new_process, policy, **options)
        self._supervisors[role] = supervisor
        run = self._tasks.create_task(supervisor.run(), name=f"supervise {role}")
        self._runs.append(run)
        return run

    def _listen(self, host: str, port: int | None = None) -> socket.socket:
        try:
            return self._resources.enter_context(listen(host, port or 0))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port:
                raise ConfigError(f"router_port={port}: the port is in use on {host}; choose another one") from error
            raise ConfigError(f"host={host!r}, router_port={port}: cannot listen there: {error}") from error

    def _router_command(self) -> list[str]:
        shared = {"request_timeout_s", "max_in_flight", "health_interval_s", "health_timeout_s", "max_failed_checks"}
        options = ["--options", self._config.model_dump_json(include=shared)]
        for server in self._servers:
            if server.url:
                options += ["--worker", server.config().model_dump_json()]
        return [sys.executable, "-m", "reward_loop.router", *options]
