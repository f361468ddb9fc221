"""Serves reward models at one address: runs their servers and a router, and restarts processes that die."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import orjson

from reward_loop._util.background_loop import in_background
from reward_loop._util.sockets import listen, reserve, url_of
from reward_loop.config import RewardModelConfig, ServedModelConfig
from reward_loop.errors import ConfigError, ServerError
from reward_loop.router.config import API_KEY_VARIABLE, BackendConfig
from reward_loop.serving.engines.engine import Engine
from reward_loop.serving.gpus import GpuShares
from reward_loop.serving.logs import log_folder
from reward_loop.serving.models import ENGINES, served_models
from reward_loop.serving.process import ServerProcess
from reward_loop.serving.supervisor import RestartPolicy, Server, Starts, Supervisor

if TYPE_CHECKING:
    from reward_loop.serving.reservation import Place, Placement

__all__ = ["RewardModelManager", "ServedRewardModel", "serve_reward_model"]

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_ROUTER_ANSWERS_WITHIN_S = 15.0
"""Timeout of control requests. The router may be slow to answer while models load and use all CPU cores.
If the request that adds a server times out, the server gets no requests."""
_SLEEPS_WITHIN_S = 120.0
_ROUTER_STOPS_WITHIN_S = 1.0
"""How long the router may take to stop before the servers are stopped, too."""


@dataclass(eq=False)
class _Worker:
    """A server and its state, as sent to the router."""

    model: ServedModelConfig
    url: str | None
    """``None`` until the address is known: in Ray, until the server is ready for the first time."""
    asleep: bool = False
    lost: str | None = None
    """The reason why the server is no longer restarted; ``None`` while it may be restarted."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the server and the router get a new state, so that a restart and `wake` do not interleave."""

    @property
    def engine(self) -> Engine | None:
        """The engine; ``None`` for an external server."""
        return ENGINES.get(self.model.engine)

    def config(self) -> BackendConfig:
        """Returns the router's configuration of this server."""
        return BackendConfig(
            url=self.url or "",
            models=(self.model.served_model_name,) if self.model.served_model_name else (),
            kind=None if self.model.kind == "auto" else self.model.kind,
            engine=self.model.engine,
            health_path=self.engine.health_path if self.engine else "/health",
        )


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
        self._workers: list[_Worker] = []

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
            self._start(models, await self._places(models))
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
        for worker in self._workers:
            if worker.engine and worker.engine.sleep_path and not worker.model.enable_sleep_mode:
                raise ConfigError(f"{worker.model.served_model_name}: set enable_sleep_mode=True to put it to sleep")
        if self._config.placement == "colocated":
            # A restarted server would not find free GPU memory while other actors use the GPUs.
            await self._starts.forbid()
        await self._with_each(self._put_to_sleep)

    async def wake(self) -> None:
        """Allocates the models' memory again; the router then sends the requests that it has held.

        Raises:
            ServerError: the router or a server did not wake up.
        """
        await self._with_each(self._wake)
        await self._starts.allow()

    async def _with_each(self, do: Callable[[_Worker], Awaitable[None]]) -> None:
        """Calls ``do`` for all servers concurrently; raises the first error after all calls have ended."""
        for error in await asyncio.gather(*map(do, self._workers), return_exceptions=True):
            if error is not None:
                raise error

    async def _put_to_sleep(self, worker: _Worker) -> None:
        async with worker.changing:
            if worker.url is None or worker.lost:
                return
            worker.asleep = True
            await self._post(self._router_url, f"/workers/sleep?url={quote(worker.url)}", router=True)
            if worker.engine and worker.engine.sleep_path:
                await self._post(worker.url, worker.engine.sleep_path)

    async def _wake(self, worker: _Worker) -> None:
        async with worker.changing:
            if worker.url is None or worker.lost:
                return
            worker.asleep = False
            if worker.engine and worker.engine.wake_path:
                await self._post(worker.url, worker.engine.wake_path)
            await self._post(self._router_url, f"/workers/resume?url={quote(worker.url)}", router=True)

    async def _places(self, models: list[ServedModelConfig]) -> dict[str, list[Place]]:
        """Returns the Ray resources of the servers by model name; empty for servers on this machine."""
        if self._config.placement == "local":
            return {}
        # Imported only if Ray is used.
        from reward_loop.serving.reservation import Demand, GpuReservation

        gpus = self._gpus or GpuReservation(timeout_s=self._config.placement_timeout_s)
        self._resources.callback(gpus.release)
        started = [model for model in models if model.engine != "external"]
        found = await gpus.places(
            [Demand(model.replicas, ENGINES[model.engine].gpus(model), model.threads) for model in started]
        )
        return {str(model.served_model_name): places for model, places in zip(started, found, strict=True)}

    def _start(self, models: list[ServedModelConfig], places: dict[str, list[Place]]) -> None:
        config = self._config
        log_dir = log_folder(config.log_dir)
        count = sum(model.replicas for model in models if model.engine != "external")
        logger.info("starting %d reward model server(s); logs are in %s", count, log_dir)
        router = self._listen(config.host, config.router_port)
        self._router_url = url_of(router)
        launch = self._beside_us(log_dir) if config.placement == "local" else self._in_ray(places)
        for model in models:
            if model.engine == "external":
                self._workers += [_Worker(model, url) for url in model.urls]
                continue
            for number, (url, new_process, close) in enumerate(launch(model), 1):
                role = f"server {len(self._supervisors) + 1}"
                of = f" of {model.served_model_name}" if len(models) > 1 else ""
                worker = _Worker(model, url)
                self._workers.append(worker)
                self._supervise(
                    role,
                    functools.partial(new_process, f"reward model server {number}/{model.replicas}{of}", role),
                    starts=self._starts,
                    on_up=functools.partial(self._server_is_up, worker),
                    on_down=functools.partial(self._tell_router, "mark_dead", worker),
                    on_lost=functools.partial(self._lose_server, worker, close),
                )
        self._router_run = self._supervise(
            "router",
            lambda: ServerProcess(
                "reward router",
                self._router_command(),
                bound=router,
                log_path=log_dir / "router.log",
                # Its /health depends on the servers, which may not be ready yet.
                health_path="/live",
                start_timeout_s=config.start_timeout_s,
            ),
            starts=Starts(1),
            on_up=self._tell_what_is_known,
            on_lost=functools.partial(self._lose_router, router),
        )

    def _supervise(self, role: str, new_process: Callable[[], Server], **options: Any) -> asyncio.Task[None]:
        assert self._tasks is not None
        policy = RestartPolicy(self._config.max_restarts, self._config.restart_window_s)
        supervisor = Supervisor(new_process, policy, **options)
        self._supervisors[role] = supervisor
        run = self._tasks.create_task(supervisor.run(), name=f"supervise {role}")
        self._runs.append(run)
        return run

    # How servers are launched

    def _beside_us(self, log_dir: Path) -> _Launch:
        shares = GpuShares()

        def launch(model: ServedModelConfig) -> Iterator[_Address]:
            engine = ENGINES[model.engine]
            name = str(model.served_model_name)
            for gpus in shares.share(engine.gpus(model), model.replicas, model.env, name):
                bound = self._resources.enter_context(listen(_HOST) if engine.inherits_socket else reserve(_HOST))

                def new_process(
                    name: str, role: str, bound: socket.socket = bound, gpus: dict[str, str] = gpus
                ) -> ServerProcess:
                    return ServerProcess(
                        name,
                        engine.command(model, *bound.getsockname()[:2]),
                        bound=bound,
                        env=engine.environment(model) | gpus,
                        log_path=log_dir / f"{role.replace(' ', '-')}.log",
                        health_path=engine.health_path,
                        start_timeout_s=model.start_timeout_s,
                    )

                yield url_of(bound), new_process, bound.close

        return launch

    def _in_ray(self, places: dict[str, list[Place]]) -> _Launch:
        from reward_loop.serving.ray_server import RayServer
        from reward_loop.serving.tunnels import new_key

        log_dir = Path(self._config.log_dir).absolute() if self._config.log_dir else None
        tunnel_key = new_key()

        def launch(model: ServedModelConfig) -> Iterator[_Address]:
            engine = ENGINES[model.engine]
            for place in places[str(model.served_model_name)]:

                def new_process(name: str, role: str, place: Place = place) -> Server:
                    return RayServer(
                        name,
                        functools.partial(engine.command, model),
                        inherits_socket=engine.inherits_socket,
                        place=place,
                        tunnel_key=tunnel_key,
                        env=engine.environment(model),
                        health_path=engine.health_path,
                        start_timeout_s=model.start_timeout_s,
                        log_path=log_dir / f"{role.replace(' ', '-')}.log" if log_dir else None,
                    )

                yield None, new_process, lambda: None

        return launch

    # Callbacks of the supervisors

    async def _server_is_up(self, worker: _Worker, url: str) -> None:
        async with worker.changing:
            if worker.asleep and worker.engine and worker.engine.sleep_path:
                await self._post(url, worker.engine.sleep_path)
            if url == worker.url:
                return
            before, worker.url = worker.url, url
            await asyncio.shield(self._supervisors["router"].started)
            await self._tell_router("add", worker)
            if worker.asleep:
                await self._tell_router("sleep", worker)
            if before:
                await self._ask_router("DELETE", f"/workers?url={quote(before)}")

    async def _lose_server(self, worker: _Worker, close: Callable[[], None], reason: str) -> None:
        # Resets the connections in the backlog, so that the router retries these requests on other servers.
        close()
        worker.lost = reason
        await self._tell_router("give_up", worker, reason)

    async def _lose_router(self, listener: socket.socket, reason: str) -> None:
        listener.close()

    async def _tell_what_is_known(self, _: str) -> None:
        """Sends the state of all servers to a restarted router."""
        for worker in self._workers:
            if worker.lost:
                await self._tell_router("give_up", worker, worker.lost)
            elif worker.asleep:
                await self._tell_router("sleep", worker)

    async def _tell_router(self, action: str, worker: _Worker, reason: str = "") -> None:
        if worker.url is None:
            return
        if action == "add":
            await self._ask_router("POST", "/workers", worker.config())
        else:
            query = urlencode({"url": worker.url, "reason": reason} if reason else {"url": worker.url})
            await self._ask_router("POST", f"/workers/{action}?{query}")

    async def _ask_router(self, method: str, path: str, body: BackendConfig | None = None) -> None:
        timeout = aiohttp.ClientTimeout(total=_ROUTER_ANSWERS_WITHIN_S)
        try:
            async with aiohttp.ClientSession(
                self._router_url, timeout=timeout, headers=_credentials(), raise_for_status=True
            ) as session:
                await session.request(method, path, json=body and body.model_dump())
        # Not an error: the router's health checks detect the state, or a restarted router receives it.
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("the router was not told to %s %s: %r", method, path, error)

    async def _post(self, url: str, path: str, *, router: bool = False) -> None:
        # The requests in flight are finished first.
        timeout = aiohttp.ClientTimeout(total=self._config.request_timeout_s + _SLEEPS_WITHIN_S)
        try:
            async with (
                aiohttp.ClientSession(url, timeout=timeout, headers=_credentials() if router else None) as session,
                session.post(path, json={}) as response,
            ):
                if response.status >= 400:
                    raise ServerError(f"{url}{path} was answered with {response.status}: {await response.text()}")
        except aiohttp.ClientConnectorError as error:
            # A server that is down receives its state when it is up again.
            logger.warning("%s%s: %r", url, path, error)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerError(f"{url}{path} was not answered: {error!r}") from error

    def _listen(self, host: str, port: int | None = None) -> socket.socket:
        try:
            return self._resources.enter_context(listen(host, port or 0))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port:
                raise ConfigError(f"router_port={port}: the port is in use on {host}; choose another one") from error
            raise ConfigError(f"host={host!r}, router_port={port}: cannot listen there: {error}") from error

    def _router_command(self) -> list[str]:
        workers = [worker.config().model_dump() for worker in self._workers if worker.url]
        options = [option for worker in workers for option in ("--worker", orjson.dumps(worker).decode())]
        for name, value in (
            ("--request-timeout", self._config.request_timeout_s),
            ("--health-interval", self._config.health_interval_s),
            ("--health-timeout", self._config.health_timeout_s),
            ("--max-failed-checks", self._config.max_failed_checks),
            # The servers stop next, so requests in flight cannot be finished.
            ("--grace", 0),
        ):
            options += [name, str(value)]
        return [sys.executable, "-m", "reward_loop.router", *options]


_Address = tuple[str | None, Callable[[str, str], Server], Callable[[], None]]
"""A server's URL, or ``None`` if it is unknown before the start; a function that creates the server's next run from a
name and a role; and a function that releases its address."""

_Launch = Callable[[ServedModelConfig], Iterator[_Address]]


def _credentials() -> dict[str, str] | None:
    key = os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else None


class ServedRewardModel:
    """Controls a :class:`RewardModelManager` that runs in another thread; see :func:`serve_reward_model`."""

    def __init__(self, manager: RewardModelManager, loop: asyncio.AbstractEventLoop) -> None:
        self._manager = manager
        self._loop = loop

    @property
    def reward_router_address(self) -> str:
        """``host:port`` of the router."""
        return self._manager.reward_router_address

    def sleep(self) -> None:
        """Frees the models' memory, and returns when that is done; see :meth:`RewardModelManager.sleep`."""
        self._run(self._manager.sleep())

    def wake(self) -> None:
        """Allocates the models' memory again, and returns when that is done; see :meth:`RewardModelManager.wake`."""
        self._run(self._manager.wake())

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


@contextmanager
def serve_reward_model(config: RewardModelConfig, gpus: Placement | None = None) -> Iterator[ServedRewardModel]:
    """Runs a :class:`RewardModelManager` on an event loop in a background thread, for synchronous programs.

        with serve_reward_model(RewardModelConfig(model_path="...")) as model:
            train(reward_router_address=model.reward_router_address)

    The processes are stopped when the block ends, or when the interpreter exits inside the block.

    Args:
        config, gpus: as for :class:`RewardModelManager`.

    Yields:
        the router's address and the methods ``sleep`` and ``wake``, once all processes are ready.

    Raises:
        ConfigError, ServerStartError: as on entry of :class:`RewardModelManager`.
    """

    @asynccontextmanager
    async def serving() -> AsyncIterator[ServedRewardModel]:
        async with RewardModelManager(config, gpus) as manager:
            yield ServedRewardModel(manager, asyncio.get_running_loop())

    with in_background(serving, name="reward-model-manager") as model:
        yield model
