"""Starts a server, and restarts it when it dies."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeAlias

from reward_loop.errors import ServerDiedError, ServerError, ServerStartError

if TYPE_CHECKING:
    from reward_loop.serving.process import ServerProcess
    from reward_loop.serving.ray_server import RayServer

    Server: TypeAlias = ServerProcess | RayServer
    """One run of a server."""

logger = logging.getLogger(__name__)

_SECOND_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0

_MAX_RESTARTS, _WINDOW_S = 3, 600.0
"""At most this number of restarts within this time in seconds; a further one waits until the oldest one is that old."""


async def _nothing(*_: str) -> None:
    pass


class Supervisor:
    """Starts a server, and restarts it when it dies.

    ====================================  ==========================  =============================
    Event                                 Effect                      Next
    ====================================  ==========================  =============================
    the server is ready                   awaits ``on_up(url)``       waits until the server dies
    the first start fails                 `started` gets the error    ends
    the server dies or a restart fails    awaits ``on_down(reason)``  restart after a pause
    ====================================  ==========================  =============================

    The first restart within the window has no pause. The second one has a pause of 0.2 s, which doubles with each
    further restart up to 30 s. After `_MAX_RESTARTS` within the window, the next one waits until the oldest has left
    it: the limit is a rate, so that three crashes in a long run do not cost the server.

    Args:
        new_process: creates the next run of the server.
        starts: shared by the servers that must not all start at the same time.
        bound: holds the server's address. Closed at :meth:`stop`.
        on_up: awaited with the URL each time the server becomes ready.
        on_down: awaited with the reason each time the server has died.
    """

    def __init__(
        self,
        new_process: Callable[[], Server],
        *,
        starts: asyncio.Semaphore | None = None,
        bound: socket.socket | None = None,
        on_up: Callable[[str], Awaitable[None]] = _nothing,
        on_down: Callable[[str], Awaitable[None]] = _nothing,
    ) -> None:
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the server is ready for the first time; raises the ServerError of a failed first start."""
        self._new_process = new_process
        self._starts = starts or asyncio.Semaphore(1)
        self._bound = bound
        self._on_up = on_up
        self._on_down = on_down
        self._process: Server | None = None
        self._restart: asyncio.Future[ServerError] | None = None
        """Set by :meth:`restart`; ``None`` while no server is ready."""
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id, or ``None`` between two runs."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the server, and restart it when it dies, in a task that ends at :meth:`stop`."""
        self._task = asyncio.create_task(self._run(), name="supervisor")

    def restart(self, reason: str) -> None:
        """Stop the server, which does not work, and restart it as after a death; without a ready server, do nothing."""
        if self._restart and not self._restart.done():
            assert self._process is not None
            self._restart.set_result(ServerDiedError(f"{self._process.name} is restarted: {reason}"))

    async def stop(self) -> None:
        """Stop the server, and wait until it is gone. If the wait is cancelled, the server is killed."""
        try:
            if self._task:
                self._task.cancel()
                # If this is cancelled, gather cancels the task again, and still waits until it has ended.
                await asyncio.gather(self._task, return_exceptions=True)
        finally:
            if self._bound:
                self._bound.close()

    async def _run(self) -> None:
        try:
            await self._restart_always()
        except Exception as error:
            if self.started.done():
                logger.exception("a server has stopped, and is not restarted")
            else:
                self.started.set_exception(error)

    async def _restart_always(self) -> None:
        restarts: deque[float] = deque()
        while True:
            try:
                error = await self._live()
            except ServerError as failed:  # by the start
                error = failed
            except OSError as failed:  # no free file descriptor, for example: later there may be one
                error = ServerStartError(f"a server cannot be started: {failed}")
            now = time.monotonic()
            while restarts and now - restarts[0] > _WINDOW_S:
                restarts.popleft()
            if not self.started.done():
                raise error
            pause = _pause_s(len(restarts))
            if len(restarts) >= _MAX_RESTARTS:
                pause = max(pause, restarts[0] + _WINDOW_S - now)
                logger.error("the limit of %d restarts within %g s is reached", len(restarts), _WINDOW_S)
            # The time of the restart, not of the death: the pause must not use up the window.
            restarts.append(now + pause)
            logger.warning("restarting in %.1f s: %s", pause, error)
            await self._on_down(str(error).partition("\n")[0])
            await asyncio.sleep(pause)

    async def _live(self) -> ServerError:
        """Run the server once; return the error with which it died."""
        process = self._process = self._new_process()
        try:
            # Outside of `_starts`: after the loss of a node, its servers may wait long for another place.
            # In a stack, so that `_starts` is free for others when the server is ready, not when it ends.
            async with process.placed(), AsyncExitStack() as stack:
                async with self._starts:
                    await stack.enter_async_context(process)
                logger.info("%s ready in %.1f s", process.name, process.started_in_s)
                # Before `started`: when the manager is entered, the router must know the server.
                await self._on_up(process.url)
                if not self.started.done():
                    self.started.set_result(None)
                return await self._ended(process)
        finally:
            self._process = None

    async def _ended(self, process: Server) -> ServerError:
        """Wait until the server dies, or :meth:`restart` is called; return the cause."""
        self._restart = asyncio.get_running_loop().create_future()
        death = asyncio.create_task(process.wait())
        ends: list[asyncio.Future[Any]] = [death, self._restart]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            cause: ServerError = done.pop().result()
            return cause
        finally:
            death.cancel()
            self._restart = None


def _pause_s(restarts: int) -> float:
    """Return the seconds before the next restart, after this number of restarts within the window."""
    return min(_SECOND_PAUSE_S * 2 ** (restarts - 1), _LONGEST_PAUSE_S) if restarts else 0.0
