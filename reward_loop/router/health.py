"""Health checks of servers, and the discovery of their models."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson

from reward_loop.errors import ServerError
from reward_loop.router.backend import Backend
from reward_loop.router.http_client import Upstream
from reward_loop.router.http_connection import BrokenError, StaleError, UpstreamError
from reward_loop.router.router_error import LOOPING

__all__ = ["AsleepError", "LoopError", "UnhealthyError", "check_health", "is_this_router"]

logger = logging.getLogger(__name__)

_LOOP_CHECK_S = 1.0
_BODY_UP_TO = 4 * 1024 * 1024


class UnhealthyError(ServerError):
    """A server answered a health check with a status of 400 or above."""


class LoopError(ServerError):
    """The URL of the server leads back to this router."""


class AsleepError(ServerError):
    """The server is healthy, but its engine sleeps: a request to it would hang."""


async def check_health(backend: Backend) -> None:
    """Checks a server's health; while the server is DOWN, also updates its `models` and `cards`.

    Raises:
        LoopError: the server is this router.
        UnhealthyError: the server answered with a status of 400 or above.
        AsleepError: the server's engine sleeps.
        UpstreamError: the server sent no complete answer.
    """
    status, body = await _get(backend.upstream, backend.config.health_path)
    if _is_own_loop(status, body):
        raise LoopError("its URL leads back to this router")
    if status >= 400:
        raise UnhealthyError(f"GET {backend.config.health_path} returned {status}")
    if backend.config.engine == "vllm":
        # /health of a sleeping engine is 200. Servers that cannot sleep do not have /is_sleeping.
        status, body = await _get(backend.upstream, "/is_sleeping")
        if status == 200 and _decoded(body).get("is_sleeping") is True:
            raise AsleepError("the engine is asleep")
    if backend.state == "down":
        await _update_models(backend)


async def is_this_router(upstream: Upstream) -> bool:
    """Returns whether the server is this router, for example under another address.

    A server that does not answer within `_LOOP_CHECK_S` seconds counts as another server. Closes `upstream`.
    """
    try:
        async with asyncio.timeout(_LOOP_CHECK_S):
            return _is_own_loop(*await _get(upstream, "/live"))
    except (UpstreamError, TimeoutError):
        return False
    finally:
        upstream.close()


async def _update_models(backend: Backend) -> None:
    try:
        status, body = await _get(backend.upstream, "/v1/models")
    except UpstreamError as error:
        logger.info("the models of %s are unknown: %s", backend.url, error)
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
        # The server has probably closed the other idle connections too: they are of about the same age.
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
