"""Whether a server is well, and what it serves."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson

from reward_loop.errors import ServerError
from reward_loop.router.backend import Backend
from reward_loop.router.http_client import BrokenError, StaleError, Upstream, UpstreamError
from reward_loop.router.pool import AsleepError, LoopError
from reward_loop.router.router_error import LOOPING

__all__ = ["UnhealthyError", "check_health", "is_this_router"]

logger = logging.getLogger(__name__)

_LOOP_CHECK_S = 1.0
_BODY_UP_TO = 4 * 1024 * 1024


class UnhealthyError(ServerError):
    """It answers, and says that it is not well."""


async def check_health(backend: Backend) -> None:
    """Requests a server's health, and its models while it is not in use.

    Raises:
        LoopError: the server is this router.
        UnhealthyError: the server reports that it is unhealthy.
        AsleepError: the server's engine sleeps.
        UpstreamError: there was no whole answer.
    """
    status, body = await _get(backend.upstream, backend.config.health_path)
    if _is_own_loop(status, body):
        raise LoopError("the health check came back to this router")
    if status >= 400:
        raise UnhealthyError(f"{backend.config.health_path} is answered with {status}")
    if backend.config.engine == "vllm":
        # A sleeping engine's health is good. Servers that cannot sleep do not know this path.
        status, body = await _get(backend.upstream, "/is_sleeping")
        if status == 200 and _decoded(body).get("is_sleeping") is True:
            raise AsleepError("the engine sleeps")
    if backend.state == "down":
        await _learn_models(backend)


async def is_this_router(upstream: Upstream) -> bool:
    """Whether the server is this router, perhaps under another address. One that does not answer at once is not."""
    try:
        async with asyncio.timeout(_LOOP_CHECK_S):
            return _is_own_loop(*await _get(upstream, "/live"))
    except (UpstreamError, TimeoutError):
        return False
    finally:
        upstream.close()


async def _learn_models(backend: Backend) -> None:
    try:
        status, body = await _get(backend.upstream, "/v1/models")
    except UpstreamError as error:
        logger.info("%s does not say what it serves: %s", backend.url, error)
        return
    cards = _decoded(body).get("data") if status == 200 else None
    if isinstance(cards, list):
        backend.cards = [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]
        backend.models = backend.config.models or tuple(card["id"] for card in backend.cards)


def _is_own_loop(status: int, body: bytes) -> bool:
    error = _decoded(body).get("error") if status == 508 else None
    return isinstance(error, dict) and error.get("message") == LOOPING


async def _get(upstream: Upstream, path: str) -> tuple[int, bytes]:
    try:
        answer = await upstream.request(b"GET", path.encode())
    except StaleError:
        # The server has closed its idle connections. The others of this pool are of about the same age.
        upstream.close_idle()
        answer = await upstream.request(b"GET", path.encode())
    try:
        body = b""
        while part := await answer.read():
            body += part
            if len(body) > _BODY_UP_TO:
                raise BrokenError(f"the answer to {path} is longer than {_BODY_UP_TO} bytes")
    finally:
        answer.close()
    return answer.status, body


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        decoded = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return decoded if isinstance(decoded, dict) else {}
