"""One server of a model as the router sees it: its address, whether it sleeps, whether it is lost."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import aiohttp

from reward_loop.config import ServedModelConfig
from reward_loop.errors import ServerError
from reward_loop.router.config import API_KEY_VARIABLE, BackendConfig
from reward_loop.serving.engine import Engine
from reward_loop.serving.engines import ENGINES

__all__ = ["ModelServer", "RouterClient"]

logger = logging.getLogger(__name__)

_PAUSE_ATTEMPTS = 3
_BETWEEN_ATTEMPTS_S = 1.0
"""Seconds between two attempts to pause a server: an engine need not wait for its requests before it answers."""
_TIMEOUT_S = 15.0
"""Timeout of requests whose failure is only logged. The router may be slow to answer while models load and use all CPU
cores. If the request that adds a server times out, the server gets no requests."""


class ModelServer:
    """The state of one server; sends each change to the router. The methods ``on_...`` are the supervisor's callbacks.

    Args:
        model: the configuration of its model.
        url: ``None`` until the address is known: in Ray, until the server is ready for the first time.
        router: the client of the router.
    """

    def __init__(self, model: ServedModelConfig, url: str | None, router: RouterClient) -> None:
        self.model = model
        self.url = url
        self._engine: Engine | type[Engine] = ENGINES.get(model.engine, Engine)  # an external server has the defaults
        self._router = router
        self._asleep = False
        self._lost: str | None = None
        """The reason why the server is no longer restarted; ``None`` while it may be restarted."""
        self._changing = asyncio.Lock()
        """Held while the server and the router get a new state, so that a restart and `wake` do not interleave."""
        self._sleep_sent = False
        """Whether this run of the server was told to sleep since it was last told to wake up."""

    @property
    def can_sleep(self) -> bool:
        """Whether the server can be put to sleep: its engine has no memory to free, or sleep mode is enabled."""
        return not self._engine.sleep_paths or self.model.enable_sleep_mode

    def config(self) -> BackendConfig:
        """Return the router's configuration of this server."""
        return BackendConfig(
            url=self.url or "",
            models=(self.model.served_model_name,) if self.model.served_model_name else (),
            kind=None if self.model.kind == "auto" else self.model.kind,
            engine=self.model.engine,
            health_path=self._engine.health_path,
        )

    async def sleep(self) -> None:
        """Put the server to sleep, after the router has stopped sending requests.

        A server that still computes after three attempts to pause it stays awake, and keeps its memory: engines die if
        they release memory while they compute. A warning says so.

        Raises:
            ServerError: the router or the server did not go to sleep.
        """
        async with self._changing:
            if self.url is None or self._lost:
                return
            self._asleep = True
            await self._router.require("sleep", self.url)
            await self._send_sleep(self.url)

    async def wake(self) -> None:
        """Wake the server up; the router then sends requests again.

        Raises:
            ServerError: the router or the server did not wake up.
        """
        async with self._changing:
            if self.url is None or self._lost:
                return
            self._asleep = False
            # SGLang dies if it must allocate memory that it has not freed.
            if self._sleep_sent:
                for path in (*self._engine.wake_paths, *self._engine.continue_paths):
                    await _send(self.url, path, self._router.timeout_s)
            self._sleep_sent = False
            await self._router.require("resume", self.url)

    async def on_up(self, url: str) -> None:
        """Put a restarted server to sleep if the others sleep; send a new URL to the router."""
        async with self._changing:
            self._sleep_sent = False
            if self._asleep:
                await self._send_sleep(url)
            if url == self.url:
                return
            before, self.url = self.url, url
            await self._router.add(self.config())
            if self._asleep:
                await self._router.report("sleep", url)
            if before:
                await self._router.remove(before)

    async def on_down(self, reason: str) -> None:
        """Report to the router that the server has died."""
        self._sleep_sent = False
        if self.url is not None:
            await self._router.report("mark_dead", self.url, reason=reason)

    async def on_lost(self, reason: str) -> None:
        """Report to the router that the server will not be restarted."""
        self._lost = reason
        await self.send_state()

    async def send_state(self) -> None:
        """Send the state to the router. A restarted router has only the addresses of the servers."""
        if self.url is None:
            return
        if self._lost:
            await self._router.report("mark_dead", self.url, reason=self._lost, lost="true")
        elif self._asleep:
            await self._router.report("sleep", self.url)

    async def _send_sleep(self, url: str) -> None:
        if not await self._pause(url):
            return
        for path in self._engine.sleep_paths:
            self._sleep_sent = True
            await _send(url, path, self._router.timeout_s)

    async def _pause(self, url: str) -> bool:
        """Have the server end its computation; return whether it did."""
        for attempt in range(1, _PAUSE_ATTEMPTS + 1):
            try:
                for path in self._engine.pause_paths:
                    await _send(url, path, self._router.timeout_s)
                return True
            except ServerError as error:
                problem = error
            if attempt < _PAUSE_ATTEMPTS:
                await asyncio.sleep(_BETWEEN_ATTEMPTS_S)
        logger.warning(
            "model %s at %s is not asleep, because it still computes after %d attempts to pause it: %s. It keeps its "
            "GPU memory until it is put to sleep the next time; if others use this GPU, they may run out of memory",
            *(self.model.served_model_name, url, _PAUSE_ATTEMPTS, problem),
        )
        for path in self._engine.continue_paths:
            await _send(url, path, self._router.timeout_s)
        return False


class RouterClient:
    """Changes the servers of a running router. The actions are its endpoints below ``/workers``.

    Except in :meth:`require`, failures are only logged as warnings: the router's health checks detect the state of a
    server, and a restarted router receives it.

    Args:
        url: the router's URL.
        started: done when the router is ready for the first time.
        timeout_s: seconds that :meth:`require` may take; the action ``sleep`` waits for the requests in flight.
    """

    def __init__(self, url: str, started: asyncio.Future[None], timeout_s: float) -> None:
        self.url = url
        self.started = started
        self.timeout_s = timeout_s

    async def add(self, backend: BackendConfig) -> None:
        """Add a server, once the router is ready."""
        await asyncio.shield(self.started)
        await self._request("POST", "/workers", backend.model_dump())

    async def remove(self, url: str) -> None:
        """Remove a server."""
        await self._request("DELETE", f"/workers?{urlencode({'url': url})}")

    async def report(self, action: str, url: str, **details: str) -> None:
        """Report the state of a server: ``mark_dead`` with a `reason` and perhaps `lost`, or ``sleep``."""
        await self._request("POST", f"/workers/{action}?{urlencode({'url': url, **details})}")

    async def require(self, action: str, url: str) -> None:
        """Have the router ``sleep`` a server, which holds its new requests, or ``resume`` it.

        Raises:
            ServerError: the router did not confirm it.
        """
        path = f"/workers/{action}?{urlencode({'url': url})}"
        await _send(self.url, path, self.timeout_s, headers=_credentials())

    async def _request(self, method: str, path: str, body: Any = None) -> None:
        try:
            await _send(self.url, path, _TIMEOUT_S, method=method, body=body, headers=_credentials())
        except ServerError as error:
            logger.warning("the router did not confirm %s %s: %s", method, path, error)


async def _send(
    url: str,
    path: str,
    timeout_s: float,
    *,
    method: str = "POST",
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send a request with a JSON body, by default a POST of ``{}``.

    A refused connection is only logged: a server that is down gets its state when it is up again.

    Raises:
        ServerError: the answer has a status of 400 or more, or did not come in time.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(url, timeout=timeout, headers=headers) as session,
            session.request(method, path, json=body or {}) as response,
        ):
            if response.status >= 400:
                raise ServerError(f"{url}{path} was answered with status {response.status}: {await response.text()}")
    except aiohttp.ClientConnectorError as error:
        logger.warning("%s%s: %r", url, path, error)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerError(f"{url}{path} was not answered: {error!r}") from error


def _credentials() -> dict[str, str] | None:
    key = os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else None
