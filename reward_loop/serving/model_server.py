"""One server of a model as the router sees it: its address, and reports of its death."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from urllib.parse import urlencode

import aiohttp

from reward_loop._util.api_keys import api_key_of
from reward_loop.router.config import API_KEY_VARIABLE, BackendConfig
from reward_loop.serving.options import ServedModelConfig

__all__ = ["ModelServer", "RouterClient"]

logger = logging.getLogger(__name__)

_TIMEOUT_S = 15.0
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
        await self._router.add(self.config())
        if before:
            await self._router.remove(before)

    async def on_down(self, reason: str) -> None:
        """Report to the router that the server has died."""
        if self.url is not None:
            await self._router.mark_dead(self.url, reason=reason)

    async def on_lost(self, reason: str) -> None:
        """Report to the router that the server will not be restarted."""
        if self.url is not None:
            await self._router.mark_dead(self.url, reason=reason, lost="true")


class RouterClient:
    """Changes the servers of a running router.

    Failures are only logged as warnings: the router's health checks detect the state of a server.

    Args:
        url: the router's URL.
        started: done when the router is ready for the first time.
    """

    def __init__(self, url: str, started: asyncio.Future[None]) -> None:
        self.url = url
        self.started = started

    async def add(self, backend: BackendConfig) -> None:
        """Add a server, once the router is ready."""
        # Shielded: the cancellation of this wait would cancel the supervisor's future.
        await asyncio.shield(self.started)
        await self._request("POST", "/workers", backend.model_dump())

    async def remove(self, url: str) -> None:
        """Remove a server."""
        await self._request("DELETE", f"/workers?{urlencode({'url': url})}")

    async def mark_dead(self, url: str, **details: str) -> None:
        """Report that a server has died, with the `reason`, and ``lost="true"`` if it will not be restarted."""
        await self._request("POST", f"/workers/mark_dead?{urlencode({'url': url, **details})}")

    async def next_hung(self) -> str:
        """Wait until a server is hung, and return its URL.

        Raises:
            aiohttp.ClientError: the router is not reachable.
        """
        await asyncio.shield(self.started)
        # Without a timeout, because a server may never hang.
        options: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=None), "headers": _authorization()}
        async with (
            aiohttp.ClientSession(self.url, raise_for_status=True, **options) as session,
            session.post("/workers/hung") as response,
        ):
            return str(await response.json())

    async def _request(self, method: str, path: str, body: Any = None) -> None:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(self.url, timeout=timeout, headers=_authorization()) as session,
                session.request(method, path, json=body or {}) as response,
            ):
                problem = None if response.status < 400 else f"status {response.status}: {await response.text()}"
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = repr(error)
        if problem is not None:
            logger.warning("the router did not confirm %s %s: %s", method, path, problem)


def _authorization() -> dict[str, str]:
    key = api_key_of(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}
