"""Whether a server is well, and what it serves."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson

from reward_loop.errors import ServerError
from reward_loop.router.backend import Backend
from reward_loop.router.http_client import StaleError, Upstream, UpstreamError
from reward_loop.router.pool import AsleepError, LoopError

__all__ = ["UnhealthyError", "check_health", "is_this_router"]

logger = logging.getLogger(__name__)

_LOOP_CHECK_S = 1.0


class UnhealthyError(ServerError):
    """It answers, and says that it is not well."""


async def check_health(backend: Backend) -> None:
    """Asks a server for its health, and, when it is not in use yet, for its models.

    Raises:
        LoopError: it is this router.
        UnhealthyError: it is not well.
        AsleepError: its engine sleeps.
        UpstreamError: it did not answer.
    """
    status, _ = await _get(backend, backend.config.health_path)
    if status == 508:
        raise LoopError("the health check came back to this router")
    if status >= 400:
        raise UnhealthyError(f"{backend.config.health_path} is answered with {status}")
    if backend.config.engine == "vllm":
        # A sleeping engine's health is good. Servers that cannot sleep do not know this path.
        status, body = await _get(backend, "/is_sleeping")
        if status == 200 and _decoded(body).get("is_sleeping") is True:
            raise AsleepError("the engine sleeps")
    if backend.state == "down":
        await _learn_models(backend)


async def is_this_router(upstream: Upstream) -> bool:
    """Whether the server is this router, perhaps under another address. One that does not answer at once is not."""
    try:
        async with asyncio.timeout(_LOOP_CHECK_S):
            answer = await upstream.request(b"GET", b"/live")
    except (UpstreamError, TimeoutError):
        return False
    finally:
        upstream.close()
    return answer.status == 508


async def _learn_models(backend: Backend) -> None:
    try:
        status, body = await _get(backend, "/v1/models")
    except UpstreamError as error:
        logger.info("%s does not say what it serves: %s", backend.url, error)
        return
    cards = _decoded(body).get("data") if status == 200 else None
    if isinstance(cards, list):
        backend.cards = [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]
        backend.models = backend.config.models or tuple(card["id"] for card in backend.cards)


async def _get(backend: Backend, path: str) -> tuple[int, bytes]:
    try:
        answer = await backend.upstream.request(b"GET", path.encode())
    except StaleError:
        # The server has closed its idle connections. The others of this pool are of about the same age.
        backend.upstream.close_idle()
        answer = await backend.upstream.request(b"GET", path.encode())
    try:
        body = b""
        while part := await answer.read():
            body += part
    finally:
        answer.close()
    return answer.status, body


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        decoded = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return decoded if isinstance(decoded, dict) else {}
