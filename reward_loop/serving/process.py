"""A server in a child process that this process owns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import anyio

from reward_loop._util.parent_death_pipe import Lifeline
from reward_loop._util.sockets import url_of
from reward_loop.errors import ServerDiedError, ServerStartError
from reward_loop.serving.logs import ServerLog

__all__ = ["ServerProcess"]

logger = logging.getLogger(__name__)

_GUARD = (sys.executable, "-m", "reward_loop.serving.reaper")

_POLL_S = 0.2
_PROGRESS_S = 15.0


class ServerProcess:
    """One run of a server, from its start to its exit.

    An async context manager: it is entered when the server answers, and at exit the process is gone. It runs in a
    session of its own, so that Ctrl-C reaches it through its owner only.

    The address is settled before the child exists, and a later run has the same one. There are two ways:

    - With a listening socket, the command is extended by ``--fd N`` (the socket) and ``--lifeline-fd N``; the child
      must end when it reads the end of the latter (:func:`reward_loop._util.parent_death_pipe.follow`). A connection
      made too early waits in the backlog.
    - With a reserved address (:func:`reward_loop._util.sockets.reserve`), the command names the port, and runs as a
      child of :mod:`reward_loop.serving.reaper`, which follows the lifeline for it. A connection made too early
      is refused.

    Args:
        name: what messages call it.
        command: program and arguments.
        bound: a listening socket, or a reservation.
        log_path: its standard output and error are appended to this file; ``None`` for a file in a new temporary
            folder. If the file cannot be written, the server runs without a log.
        env: environment variables, added to this process's.
        health_path: a GET of it is answered with a status below 400 once the server is ready.
        start_timeout_s: seconds until it must be ready.
        stop_timeout_s: seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        bound: socket.socket,
        log_path: Path | None,
        env: Mapping[str, str] | None = None,
        health_path: str = "/health",
        start_timeout_s: float = 600.0,
        stop_timeout_s: float = 10.0,
    ) -> None:
        self.name = name
        self.log = ServerLog(name, log_path)
        self.started_in_s: float | None = None
        """How many seconds it took to become ready; ``None`` until then."""
        self._command = list(command)
        self._bound = bound
        self._inherits_socket = bool(bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        self._env = dict(env or {})
        self._health_path = health_path
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: Lifeline | None = None
        self._exited: asyncio.Future[int] | None = None

    @property
    def url(self) -> str:
        """``http://host:port``"""
        return url_of(self._bound)

    @property
    def pid(self) -> int | None:
        """The process id, once there is one."""
        return self._process.pid if self._process else None

    async def __aenter__(self) -> Self:
        began = time.monotonic()
        self._spawn()
        try:
            await self._ready()
        except BaseException:
            await self._stop()
            raise
        self.started_in_s = time.monotonic() - began
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()

    async def wait(self) -> ServerDiedError:
        """Waits until the process ends by itself, and returns an error that says how and shows the log's tail."""
        assert self._exited is not None
        code = await asyncio.shield(self._exited)
        return ServerDiedError(f"{self.name} (pid {self.pid}) {_ending(code)}.\n{self.log.end()}")

    def _spawn(self) -> None:
        loop = asyncio.get_running_loop()
        self._exited = loop.create_future()
        self._lifeline = Lifeline()
        fd = self._bound.fileno()
        lifeline = ("--lifeline-fd", str(self._lifeline.child_fd))
        command, fds = [*_GUARD, *lifeline, "--", *self._command], [self._lifeline.child_fd]
        if self._inherits_socket:
            command, fds = [*self._command, "--fd", str(fd), *lifeline], [fd, *fds]
        try:
            with self.log.open() as log:
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, **self._env},
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            self._lifeline.cut()
            raise ServerStartError(f"{self.name} cannot be started: {error}") from error
        self._lifeline.release()
        # A thread rather than asyncio's child watcher: it works on every loop, in every thread.
        waiter = threading.Thread(
            target=_wait, args=(self._process, loop, self._exited), name=f"wait-{self.name}", daemon=True
        )
        waiter.start()

    async def _ready(self) -> None:
        assert self._exited is not None
        health = asyncio.create_task(self._ask_health())
        began = time.monotonic()
        deadline = began + self._start_timeout_s
        try:
            while not (health.done() or self._exited.done()) and (left := deadline - time.monotonic()) > 0:
                await asyncio.wait(
                    [health, self._exited], timeout=min(_PROGRESS_S, left), return_when=asyncio.FIRST_COMPLETED
                )
                if not (health.done() or self._exited.done()):
                    elapsed, last = time.monotonic() - began, (self.log.lines() or [""])[-1]
                    logger.info("%s has been starting for %.0f s: %s", self.name, elapsed, last[:200])
            if self._exited.done():
                what = f"{_ending(self._exited.result())} before it was ready"
            elif not health.done():
                what = f"was not ready after {self._start_timeout_s:g} s"
            elif health.exception():
                what = f"cannot be asked for its health: {health.exception()}"
            elif (status := health.result()) < 400:
                return
            else:
                what = f"answered {self._health_path} with status {status}"
        finally:
            health.cancel()
        raise ServerStartError(f"{self.name} {what}.\n{self.log.end()}")

    async def _ask_health(self) -> int:
        """The status of the health check; of one that succeeds, if the server binds its address by itself."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=None)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                try:
                    async with session.get(self.url + self._health_path) as response:
                        if response.status < 400 or self._inherits_socket:
                            return response.status
                except aiohttp.ClientError:
                    if self._inherits_socket:
                        raise
                # There is no event to wait for: the server does not say when it listens.
                await asyncio.sleep(_POLL_S)

    async def _stop(self) -> None:
        process, exited, lifeline = self._process, self._exited, self._lifeline
        if process is None or exited is None or lifeline is None:
            return
        try:
            with anyio.CancelScope(shield=True):
                if not exited.done():
                    _signal(process, signal.SIGTERM)
                    await asyncio.wait([exited], timeout=self._stop_timeout_s)
                if not exited.done():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    await asyncio.wait([exited])
        finally:
            # Reached without an exit only if the waiting was broken off, by a second Ctrl-C for example.
            if not exited.done():
                _signal(process, signal.SIGKILL)
            lifeline.cut()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # Popen's own method first looks whether it has ended, and reaps it then, in the place of the thread that waits.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _wait(process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop, exited: asyncio.Future[int]) -> None:
    # While it is not reaped, its number cannot be another process's. What it leaves behind ends with it.
    # Other code of this process may have reaped it, such as a handler of SIGCHLD; its end is noticed all the same.
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    # The loop is closed when its owner was broken off; nobody waits then.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(exited.set_result, code)


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
