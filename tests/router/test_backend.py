from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from reward_loop.errors import ServerError
from reward_loop.router.backend import AsleepError, Backend, check_health
from reward_loop.router.config import BackendConfig
from reward_loop.router.http_client import BrokenError, Upstream
from tests.support.servers import serving


def server(**answers: tuple[int, Any]) -> Any:
    """Answers the paths that it knows, and others with 404."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        status, body = answers.get(scope["path"].rpartition("/")[2], (404, None))
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": orjson.dumps(body)})

    return app


@asynccontextmanager
async def backend_for(app: Any, **options: Any) -> AsyncIterator[Backend]:
    async with serving(app) as url:
        backend = Backend(BackendConfig(url=url, **options), Upstream(url))
        yield backend
        backend.upstream.close()


MODELS = {"data": [{"id": "a", "owned_by": "x"}, {"id": 3}, "odd", {"id": "b"}]}


async def test_a_server_that_is_well_is_asked_what_it_serves_until_it_is_in_use() -> None:
    async with backend_for(server(health=(200, {}), models=(200, MODELS))) as backend:
        await check_health(backend)
        assert backend.models == ("a", "b")
        backend.models, backend.up = (), True
        await check_health(backend)
        assert backend.models == ()


async def test_configured_names_come_first_and_odd_lists_are_no_matter() -> None:
    async with backend_for(server(health=(200, {}), models=(200, MODELS)), models=("own",)) as backend:
        await check_health(backend)
        assert backend.models == ("own",)
    for models in ((500, {}), (200, []), (200, {"data": 1})):
        async with backend_for(server(health=(200, {}), models=models)) as backend:
            await check_health(backend)
            assert backend.models == ()


async def test_an_error_of_the_health_check_counts() -> None:
    async with backend_for(server(health=(503, {}))) as backend:
        with pytest.raises(ServerError, match="GET /health returned 503"):
            await check_health(backend)


@pytest.mark.parametrize("engine", ["vllm", "external"])
async def test_only_a_vllm_is_asked_whether_it_sleeps(engine: str) -> None:
    async with backend_for(
        server(health=(200, {}), is_sleeping=(200, {"is_sleeping": True})), engine=engine
    ) as backend:
        if engine == "vllm":
            with pytest.raises(AsleepError):
                await check_health(backend)
        else:
            await check_health(backend)


async def test_the_length_of_a_health_answer_is_bounded() -> None:
    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with contextlib.suppress(OSError):
            for _ in range(64):
                await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with backend_for(endless) as backend:
        with pytest.raises(BrokenError, match="/health is longer than 4194304 bytes"):
            await check_health(backend)
