"""Starts a server, and restarts it when it dies."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol

from reward_loop.errors import ServerDiedError, ServerError, ServerStartError

logger = logging.getLogger(__name__)

_SECOND_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0


class Server(AbstractAsyncContextManager[Any, None], Protocol):
    """One run of a server: a ``ServerProcess`` or a ``RayServer``."""

    name: str
    started_in_s: float | None

    @property
    def pid(self) -> int | None:
        """The process id; ``None`` before the start."""

    @property
    def url(self) -> str:
        """``http://host:port``; final once the context has been entered."""

    def placed(self) -> AbstractAsyncContextManager[None]:
        """A context that must be open while the server runs. Entry waits until there is a place for the server.

        Raises:
            ServerStartError: there was no place in time.
        """

    async def wait(self) -> ServerDiedError:
        """Wait until the server exits by itself."""


async def _nothing(*_: str) -> None:
    pass


class Supervisor:
    """Starts a server, and restarts it when it dies.

    ====================================  ==========================  ==================================================
    Event                                 Effect                      Next
    ====================================  ==========================  ==================================================
    the server is ready                   awaits ``on_up(url)``       waits until the server dies
    the first start fails                 `started` gets the error    ends
    the server dies or a restart fails    awaits ``on_down(reason)``  restart after a pause
    as before, without restarts           awaits ``on_lost(reason)``  ends
    ====================================  ==========================  ==================================================

    The first restart within the window has no pause. The second one has a pause of 0.2 s, which doubles with each
    further restart up to 30 s. After `max_restarts` restarts within the window, the next one waits until the oldest has
    left the window: the limit is a rate, so that three crashes in a long run do not cost the server.

    Args:
        new_process: creates the next run of the server.
        max_restarts: the largest number of restarts within the window; 0 never restarts the server.
        window_s: the length of the window in seconds.
        starts: shared by the servers that must not all start at the same time.
        bound: holds the server's address. Closed when the server is lost, and at :meth:`stop`.
        on_up: awaited with the URL each time the server becomes ready.
        on_down: awaited with the reason each time the server has died and will be restarted.
        on_lost: awaited with the reason when the server has died and will not be restarted.
    """

    def __init__(
        self,
        new_process: Callable[[], Server],
        *,
        max_restarts: int,
        window_s: float,
        starts: asyncio.Semaphore | None = None,
        bound: socket.socket | None = None,
        on_up: Callable[[str], Awaitable[None]] = _nothing,
        on_down: Callable[[str], Awaitable[None]] = _nothing,
        on_lost: Callable[[str], Awaitable[None]] = _nothing,
    ) -> None:
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the server is ready for the first time; raises the ServerError of a failed first start."""
        self._new_process = new_process
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._starts = starts or asyncio.Semaphore(1)
        self._bound = bound
        self._on_up = on_up
        self._on_down = on_down
        self._on_lost = on_lost
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
            self._release()

    async def _run(self) -> None:
        try:
            await self._restart_until_lost()
        except Exception as error:
            if self.started.done():
                logger.exception("a server has stopped, and is not restarted")
            else:
                self.started.set_exception(error)

    async def _restart_until_lost(self) -> None:
        restarts: deque[float] = deque()
        while True:
            try:
                error = await self._live()
            except ServerError as failed:  # by the start
                error = failed
            except OSError as failed:  # no free file descriptor, for example: later there may be one
                error = ServerStartError(f"a server cannot be started: {failed}")
            now = time.monotonic()
            while restarts and now - restarts[0] > self._window_s:
                restarts.popleft()
            if not self.started.done():
                raise error
            if not self._max_restarts:
                logger.error("not restarted (max_restarts=0): %s", error)
                self._release()
                await self._on_lost(_first_line(error))
                return
            pause = _pause_s(len(restarts))
            if len(restarts) >= self._max_restarts:
                pause = max(pause, restarts[0] + self._window_s - now)
                logger.error(
                    "the limit of %d restarts within %g s is reached (max_restarts, restart_window_s)",
                    *(len(restarts), self._window_s),
                )
            # The time of the restart, not of the death: the pause must not use up the window.
            restarts.append(now + pause)
            logger.warning("restarting in %.1f s: %s", pause, error)
            await self._on_down(_first_line(error))
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

    def _release(self) -> None:
        """Close the socket: connections in its backlog are reset, so that the router retries their requests."""
        if self._bound:
            self._bound.close()


def _pause_s(restarts: int) -> float:
    """Return the seconds before the next restart, after this number of restarts within the window."""
    return min(_SECOND_PAUSE_S * 2 ** (restarts - 1), _LONGEST_PAUSE_S) if restarts else 0.0


def _first_line(error: ServerError) -> str:
    return str(error).partition("\n")[0]
