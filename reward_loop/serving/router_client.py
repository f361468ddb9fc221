"""Sends requests to the control plane of the router, and to the sleep endpoints of servers."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any
from urllib.parse import urlencode

import aiohttp

from reward_loop.errors import ServerError
from reward_loop.router.config import API_KEY_VARIABLE, BackendConfig

__all__ = ["RouterClient", "post"]

logger = logging.getLogger(__name__)

_TIMEOUT_S = 15.0
"""Timeout of requests whose failure is only logged. The router may be slow to answer while models load and use all CPU
cores. If the request that adds a server times out, the server gets no requests."""


class RouterClient:
    """Changes the servers of a running router.

    The methods other than `sleep` and `resume` log failures as warnings: the router's health checks detect the state of
    a server, and a restarted router receives it.

    Args:
        url: the router's URL.
        started: done when the router is ready for the first time.
        timeout_s: seconds that `sleep` and `resume` may take; `sleep` waits for the requests in flight.
    """

    def __init__(self, url: str, started: asyncio.Future[None], timeout_s: float) -> None:
        self.url = url
        self.started = started
        self.timeout_s = timeout_s

    async def add(self, backend: BackendConfig) -> None:
        """Adds a server, once the router is ready."""
        await asyncio.shield(self.started)
        await self._request("POST", "/workers", backend.model_dump())

    async def remove(self, url: str) -> None:
        """Removes a server."""
        await self._request("DELETE", _path("", url=url))

    async def mark_dead(self, url: str, reason: str) -> None:
        """Reports that the process of a server has died and will be restarted."""
        await self._request("POST", _path("/mark_dead", url=url, reason=reason))

    async def give_up(self, url: str, reason: str) -> None:
        """Reports that a server will not be restarted."""
        await self._request("POST", _path("/give_up", url=url, reason=reason))

    async def mark_asleep(self, url: str) -> None:
        """Reports that a server sleeps, as `sleep` does; a failure is only logged."""
        await self._request("POST", _path("/sleep", url=url))

    async def sleep(self, url: str) -> None:
        """Holds new requests for a server, and waits for its requests in flight.

        Raises:
            ServerError: the router did not confirm it.
        """
        await post(self.url, _path("/sleep", url=url), self.timeout_s, headers=_credentials())

    async def resume(self, url: str) -> None:
        """Sends requests to a server again, those held included.

        Raises:
            ServerError: the router did not confirm it.
        """
        await post(self.url, _path("/resume", url=url), self.timeout_s, headers=_credentials())

    async def _request(self, method: str, path: str, body: Any = None) -> None:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(
                self.url, timeout=timeout, headers=_credentials(), raise_for_status=True
            ) as session:
                await session.request(method, path, json=body)
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("the router did not confirm %s %s: %r", method, path, error)


async def post(url: str, path: str, timeout_s: float, headers: dict[str, str] | None = None) -> None:
    """Sends a POST of ``{}``.

    A refused connection is only logged: a server that is down gets its state when it is up again.

    Raises:
        ServerError: the answer has a status of 400 or more, or did not come in time.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(url, timeout=timeout, headers=headers) as session,
            session.post(path, json={}) as response,
        ):
            if response.status >= 400:
                raise ServerError(f"{url}{path} was answered with status {response.status}: {await response.text()}")
    except aiohttp.ClientConnectorError as error:
        logger.warning("%s%s: %r", url, path, error)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerError(f"{url}{path} was not answered: {error!r}") from error


def _path(action: str, **query: str) -> str:
    return f"/workers{action}?{urlencode(query)}"


def _credentials() -> dict[str, str] | None:
    key = os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else None
