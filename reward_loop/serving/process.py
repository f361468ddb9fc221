"""Runs a server in a child process, which never outlives this process, with a log file."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp
import anyio

from reward_loop._util.process import ParentDeathPipe, kill_marked
from reward_loop._util.signals import name_of
from reward_loop._util.web_server import url_of
from reward_loop.errors import ServerDiedError, ServerStartError

logger = logging.getLogger(__name__)

_REAPER = (sys.executable, "-m", "reward_loop.serving.reaper")

_POLL_S = 0.2
_STOPS_WITHIN_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
_PROGRESS_S = 60.0

_TAIL_BYTES = 8192
_TAIL_LINES = 25


class ServerProcess:
    """One run of a server in a child process, from start to exit.

    An async context manager: entry returns when the server is ready, and after exit the process is gone, with all
    processes that it started, whatever their session. It has its own session, so a Ctrl-C in the terminal does not
    reach it.

    The address is fixed before the child starts, and later runs can use the same one. `bound` has two forms:

    - A listening socket: ``--fd N`` (the socket) and ``--parent-pipe N`` (see `ParentDeathPipe`) are added to the
      command. Connections made before the server is ready wait in the backlog.
    - A reserved address (see `reserve`): the command contains the port, and runs as a child of
      :mod:`reward_loop.serving.reaper`. Connections made before the server is ready are refused.

    Args:
        name: the server's name in messages.
        command: program and arguments.
        bound: a listening socket or a reserved address.
        log_path: the file to which standard output and error are appended.
        env: environment variables in addition to those of this process.
        health_path: the server is ready when a GET of this path returns a status below 400.
        start_timeout_s: seconds within which the server must be ready.

    Entering raises:
        ServerStartError: the process cannot be started, exits early, or is not ready in time. The message shows the end
            of the log.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        bound: socket.socket,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        health_path: str = "/health",
        start_timeout_s: float = 3600.0,
    ) -> None:
        self.name = name
        self._log_path = log_path
        self.started_in_s: float | None = None
        """Seconds from the start until the server was ready; ``None`` before."""
        self._command = list(command)
        self._bound = bound
        # Whether it listens: a reserved address never does.
        self._inherits_socket = bool(bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        self._mark = f"REWARD_LOOP_SERVER={uuid.uuid4().hex}"
        # SPT_NOENV: vLLM and SGLang name their processes with setproctitle, which would overwrite the mark.
        self._env = {**(env or {}), **dict([self._mark.split("=")]), "SPT_NOENV": "1"}
        self._health_path = health_path
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._parent_death: ParentDeathPipe | None = None
        self._exited: asyncio.Future[int] | None = None

    @property
    def url(self) -> str:
        """``http://host:port``"""
        return url_of(self._bound)

    @property
    def pid(self) -> int | None:
        """The process id, of the reaper if `bound` is a reserved address; ``None`` before the start."""
        return self._process.pid if self._process else None

    def placed(self) -> contextlib.nullcontext[None]:
        """A context that does nothing: the process runs on this machine."""
        return contextlib.nullcontext()

    async def __aenter__(self) -> Self:
        began = time.monotonic()
        self._spawn()
        try:
            await self._ready()
        # A cancellation, too: the process must not stay if nothing waits for it.
        except BaseException:
            await self._stop()
            raise
        self.started_in_s = time.monotonic() - began
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def wait(self) -> ServerDiedError:
        """Wait until the process exits by itself; return an error with the exit status and the end of the log."""
        assert self._exited is not None
        # Shielded: `_stop` waits for the same future, which a cancellation here would cancel.
        code = await asyncio.shield(self._exited)
        return ServerDiedError(f"{self.name} (pid {self.pid}) {_ending(code)}.\n{self._end_of_log()}")

    def _spawn(self) -> None:
        loop = asyncio.get_running_loop()
        self._exited = loop.create_future()
        self._parent_death = ParentDeathPipe()
        fds = [self._parent_death.child_fd]
        if self._inherits_socket:
            fds.append(self._bound.fileno())
            command = [*self._command, "--fd", str(fds[1]), "--parent-pipe", str(fds[0])]
        else:
            command = [*_REAPER, str(fds[0]), *self._command]
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("ab") as log:
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
            self._parent_death.close()
            raise ServerStartError(f"{self.name} cannot be started, with its log {self._log_path}: {error}") from error
        self._parent_death.close_child_fd()
        # A thread works with every event loop and in every thread; asyncio's child watcher does not.
        waiter = (self._process, self._mark, loop, self._exited)
        try:
            threading.Thread(target=_wait, args=waiter, name=f"wait-{self.name}", daemon=True).start()
        except RuntimeError as error:  # the user's processes and threads have reached their limit
            os.killpg(self._process.pid, signal.SIGKILL)
            _wait(*waiter)
            self._parent_death.close()
            raise ServerStartError(f"{self.name} cannot be started: {error} (see `ulimit -u`)") from error

    async def _ready(self) -> None:
        assert self._exited is not None
        health = asyncio.create_task(self._healthy())
        progress = asyncio.create_task(self._log_progress())
        try:
            ends: list[asyncio.Future[Any]] = [health, self._exited]
            await asyncio.wait(ends, timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            health.cancel()
            progress.cancel()
        if self._exited.done():
            problem = f"{_ending(self._exited.result())} before it was ready"
        elif health.done():
            return
        else:
            problem = f"was not ready after {self._start_timeout_s:g} s"
        raise ServerStartError(f"{self.name} {problem}.\n{self._end_of_log()}")

    async def _log_progress(self) -> None:
        for elapsed in itertools.count(_PROGRESS_S, _PROGRESS_S):
            await asyncio.sleep(_PROGRESS_S)
            last = (self._log_lines() or [""])[-1]
            logger.info("%s is still starting after %.0f s; its last log line: %s", self.name, elapsed, last[:200])

    def _log_lines(self) -> list[str]:
        """Return up to 25 last lines of the log; an empty list if it cannot be read."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError:
            return []

    def _end_of_log(self) -> str:
        lines = self._log_lines()
        if not lines:
            return f"Its log {self._log_path} is empty."
        return "\n".join([f"The end of its log {self._log_path}:", *(f"    {line}" for line in lines)])

    async def _healthy(self) -> None:
        """Return once the health check succeeds."""
        # None: a request in the backlog is answered when the server is ready, and `_ready` has the deadline.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=None)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with session.get(self.url + self._health_path) as response:
                        if response.status < 400:
                            return
                # Polling, because an engine does not signal when it listens.
                await asyncio.sleep(_POLL_S)

    async def _stop(self) -> None:
        process, exited, parent_death = self._process, self._exited, self._parent_death
        if process is None or exited is None or parent_death is None:
            return
        try:
            # Shielded: a stop that is cancelled must not leave the process running.
            with anyio.CancelScope(shield=True):
                if not exited.done():
                    _signal(process, signal.SIGTERM)
                    await asyncio.wait([exited], timeout=_STOPS_WITHIN_S)
                if not exited.done():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    await asyncio.wait([exited])
        finally:
            # The process still runs only if the wait was interrupted, for example by a second Ctrl-C.
            if not exited.done():
                _signal(process, signal.SIGKILL)
            # Only now: the child kills itself when its end of the pipe is closed.
            parent_death.close()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # Popen.send_signal would first poll the process, and reap it in place of the waiting thread.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _wait(
    process: subprocess.Popen[bytes], mark: str, loop: asyncio.AbstractEventLoop, exited: asyncio.Future[int]
) -> None:
    # WNOWAIT does not reap the process, so its pid cannot be reused before killpg, which kills what it left behind.
    # ChildProcessError: other code of this process, such as a SIGCHLD handler, has reaped it.
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    # An engine core has its own session, and may ignore SIGTERM: it would keep its GPU's memory from the next server.
    try:
        kill_marked(mark)
    finally:  # or `stop` would wait without end
        # The loop is closed if its owner was interrupted; then no task waits for the result.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(exited.set_result, code)


def _ending(code: int) -> str:
    return f"was killed by {name_of(-code)}" if code < 0 else f"exited with status {code}"
