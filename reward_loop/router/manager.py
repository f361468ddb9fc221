"""A reward model at one address: its servers, the router in front of them, and what keeps them alive."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from reward_loop.config import RewardModelConfig
from reward_loop.errors import ConfigError
from reward_loop.router.background import in_background
from reward_loop.router.servers import transformers
from reward_loop.router.servers.checkpoint import model_kind
from reward_loop.router.servers.process import ServerProcess, listen, url_of
from reward_loop.router.supervisor import RestartPolicy, Supervisor

__all__ = ["RewardModelManager", "serve_reward_model"]

logger = logging.getLogger(__name__)

_STARTS_AT_A_TIME = 2
_ROUTER_ANSWERS_WITHIN_S = 2.0


class RewardModelManager:
    """Runs a reward model's servers and their router, each in a process of its own, while the context is open.

        async with RewardModelManager(RewardModelConfig(model_path="...")) as models:
            address = models.reward_router_address

    On entry, it waits until all of them are ready. A process that dies is started again at the same address, with
    growing pauses; requests meanwhile go to the other servers, or wait. One that dies more than `max_restarts` times
    within `restart_window_s` is given up, with an error in the log. On exit no process is left, nor is one left when
    this process is killed.

    Entry and exit must happen in the same task. Synchronous programs use
    :func:`serve_reward_model`.

    Entering raises:
        ConfigError: there is no model at `model_path`, its kind is not the configured one, or the port is in use.
        ServerStartError: a server or the router did not become ready; the message shows the end of its log.
    """

    def __init__(self, config: RewardModelConfig) -> None:
        self._config = config
        self._supervisors: dict[str, Supervisor] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._runs: list[asyncio.Task[None]] = []
        self._listeners = ExitStack()
        self._router_url = ""
        self._lost: dict[str, str] = {}

    @property
    def reward_router_address(self) -> str:
        """The router's ``host:port``."""
        return urlsplit(self._router_url).netloc

    def pids(self) -> dict[str, int]:
        """The process ids of what runs now, under ``router``, ``server 1``, ``server 2`` and so on."""
        return {role: supervisor.pid for role, supervisor in self._supervisors.items() if supervisor.pid}

    async def __aenter__(self) -> Self:
        self._check()
        try:
            self._tasks = await asyncio.TaskGroup().__aenter__()
            self._start()
            await asyncio.gather(*(supervisor.started for supervisor in self._supervisors.values()))
        except BaseException:
            await self.stop()
            raise
        logger.info("reward model %s is ready at %s", self._config.model_path, self.reward_router_address)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stops every process, and waits until it is gone. Leaving the context does this; doing it twice is fine."""
        tasks, self._tasks = self._tasks, None
        try:
            if tasks:
                for run in self._runs:
                    run.cancel()
                await tasks.__aexit__(None, None, None)
        finally:
            self._listeners.close()

    def _check(self) -> None:
        kind = model_kind(self._config.model_path, "model_path")
        if self._config.kind not in ("auto", kind):
            raise ConfigError(f"kind={self._config.kind!r}: the model in {self._config.model_path!r} is {kind}")

    def _start(self) -> None:
        config = self._config
        log_dir = Path(config.log_dir or tempfile.mkdtemp(prefix="reward_loop-"))
        log_dir.mkdir(parents=True, exist_ok=True)
        logger.info("starting %d reward model server(s); logs are in %s", config.replicas, log_dir)
        router = self._listen(config.host, config.router_port)
        servers = [self._listen("127.0.0.1") for _ in range(config.replicas)]
        self._router_url = url_of(router)
        process = functools.partial(ServerProcess, start_timeout_s=config.start_timeout_s)
        starts = asyncio.Semaphore(_STARTS_AT_A_TIME)
        for number, listener in enumerate(servers, 1):
            self._supervise(
                f"server {number}",
                functools.partial(
                    process,
                    f"reward model server {number}/{config.replicas}",
                    transformers.command(config),
                    listener=listener,
                    env=transformers.environment(config),
                    log_path=log_dir / f"server-{number}.log",
                ),
                starts=starts,
                on_down=functools.partial(self._tell_router, "bury", url_of(listener)),
                on_lost=functools.partial(self._lose_server, listener, url_of(listener)),
            )
        self._supervise(
            "router",
            functools.partial(
                process,
                "reward router",
                self._router_command([url_of(listener) for listener in servers]),
                listener=router,
                log_path=log_dir / "router.log",
                # Its health is that of the servers, which are still to come.
                health_path="/live",
            ),
            starts=asyncio.Semaphore(),
            on_up=self._tell_lost,
            on_lost=functools.partial(self._lose_router, router),
        )

    def _supervise(self, role: str, new_process: Callable[[], ServerProcess], **options: Any) -> None:
        assert self._tasks is not None
        policy = RestartPolicy(self._config.max_restarts, self._config.restart_window_s)
        supervisor = Supervisor(new_process, policy, **options)
        self._supervisors[role] = supervisor
        self._runs.append(self._tasks.create_task(supervisor.run(), name=f"supervise {role}"))

    async def _lose_server(self, listener: socket.socket, url: str, reason: str) -> None:
        # Resets the connections in its backlog, so that the router sends those requests elsewhere.
        listener.close()
        self._lost[url] = reason
        await self._tell_router("retire", url, reason)

    async def _lose_router(self, listener: socket.socket, reason: str) -> None:
        listener.close()

    async def _tell_lost(self) -> None:
        """Tells a new router what the one before it knew."""
        for url, reason in self._lost.items():
            await self._tell_router("retire", url, reason)

    async def _tell_router(self, action: str, url: str, reason: str) -> None:
        timeout = aiohttp.ClientTimeout(total=_ROUTER_ANSWERS_WITHIN_S)
        try:
            key = os.environ.get("REWARD_LOOP_API_KEY")
            headers = {"Authorization": f"Bearer {key}"} if key else None
            async with aiohttp.ClientSession(
                self._router_url, timeout=timeout, headers=headers, raise_for_status=True
            ) as session:
                await session.post(f"/workers/{action}", params={"url": url, "reason": reason})
        # A router that is away finds out by itself, or is told when it is back.
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("the router was not told to %s %s: %r", action, url, error)

    def _listen(self, host: str, port: int | None = None) -> socket.socket:
        try:
            return self._listeners.enter_context(listen(host, port or 0))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port:
                raise ConfigError(f"router_port={port}: the port is in use on {host}; choose another one") from error
            raise ConfigError(f"host={host!r}, router_port={port}: cannot listen there: {error}") from error

    def _router_command(self, workers: list[str]) -> list[str]:
        timeout = str(self._config.request_timeout_s)
        options = [option for url in workers for option in ("--worker", url)]
        return [sys.executable, "-m", "reward_loop.router", "--request-timeout", timeout, *options]


@contextmanager
def serve_reward_model(config: RewardModelConfig) -> Iterator[str]:
    """A :class:`RewardModelManager` for synchronous programs, on an event loop in a background thread.

        with serve_reward_model(RewardModelConfig(model_path="...")) as address:
            train(reward_router_address=address)

    The processes are stopped when the block is left, or when the interpreter exits without leaving it.

    Yields:
        the router's ``host:port``, once everything is ready.

    Raises:
        ConfigError, ServerStartError: as the manager does on entry.
    """
    with in_background(lambda: RewardModelManager(config), name="reward-model-manager") as manager:
        yield manager.reward_router_address
