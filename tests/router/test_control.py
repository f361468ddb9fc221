from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from reward_loop.router import app, control
from tests.support.servers import CHAT, listed, model_server, post, routed, serving


def test_the_router_passes_on_the_paths_that_the_control_plane_has() -> None:
    nothing: Any = None
    routes: Any = control._app(nothing, nothing).routes
    assert {route.path for route in routes} == app._CONTROL_PATHS


async def test_servers_come_and_go_while_it_runs() -> None:
    async with routed(model_server("a")) as (url, urls, session), serving(model_server("a")) as other:
        async with session.post("/workers", json={"url": other, "kind": "generative"}) as response:
            assert response.status == 201
        async with session.post("/workers", json={"url": other}) as response:
            assert response.status == 409
        async with session.post("/workers", json={"url": "ftp://x"}) as response:
            assert response.status == 422
        async with session.post("/workers", json={"url": url}) as response:
            assert (response.status, "is this router itself" in await response.text()) == (422, True)
        killed = {"url": urls[0], "reason": "killed"}
        async with session.post("/workers/mark_dead", params=killed) as response:
            assert response.status == 200
        assert [(await post(url, CHAT))[0] for _ in range(3)] == [200] * 3
        async with session.delete("/workers", params={"url": urls[0]}) as response:
            assert response.status == 200
        assert [backend["url"] for backend in await listed(session)] == [other]
        async with session.delete("/workers", params={"url": urls[0]}) as response:
            assert response.status == 404


async def test_removing_a_server_returns_when_its_requests_in_flight_have_ended() -> None:
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == CHAT:
            arrived.set()
            await go_on.wait()
        await model_server("slow")(scope, receive, send)

    async with routed(slow) as (url, urls, session), asyncio.timeout(60):
        request = asyncio.create_task(post(url, CHAT))
        await arrived.wait()
        removing = asyncio.create_task(session.delete("/workers", params={"url": urls[0]}))
        while await listed(session):  # noqa: ASYNC110 (the list has no event)
            await asyncio.sleep(0)
        assert (await post(url, CHAT))[0] == 503
        assert not removing.done()
        go_on.set()
        assert await request == (200, b"slow")
        assert (await removing).status == 200


async def test_health_reports_the_servers_and_live_the_router() -> None:
    async with routed(model_server("a")) as (_, urls, session):
        for method, path, status in (("GET", "/health", 200), ("HEAD", "/ready", 200), ("POST", "/live", 405)):
            async with session.request(method, path) as response:
                assert response.status == status
        async with session.delete("/workers", params={"url": urls[0]}):
            pass
        for path, status in (("/health", 503), ("/ready", 503), ("/live", 200)):
            async with session.get(path) as response:
                assert response.status == status
                assert response.headers.get("Retry-After") == ("1" if status == 503 else None)


async def refused(session: aiohttp.ClientSession, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of a request, once its answer has the shape of the router's errors."""
    async with session.request(method, path, **options) as response:
        content = await response.json()
    assert list(content) == ["error"]
    error: dict[str, Any] = content["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], error["code"]) == ("RouterError", response.status)
    return response.status, error


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "message"),
    [
        ("POST", "/workers", {"data": b"no JSON"}, 422, "body"),
        ("POST", "/workers", {"data": b'{"a":' * 900 + b"1" + b"}" * 900}, 422, "body"),
        ("POST", "/workers", {"json": {"url": "ftp://x"}}, 422, "expected http://host:port"),
        ("POST", "/workers", {"json": {"url": "http://x:1", "kind": "odd"}}, 422, "body.kind"),
        ("POST", "/workers", {"json": {}}, 422, "body.url"),
        ("DELETE", "/workers", {}, 422, "query.url"),
        ("DELETE", "/workers", {"params": {"url": "http://x:1"}}, 404, "unknown server 'http://x:1'"),
        ("POST", "/workers/mark_dead", {"params": {"url": "http://x:1"}}, 422, "query.reason"),
        ("PUT", "/workers", {}, 405, "Method Not Allowed"),
        ("GET", "/workers/mark_dead", {}, 405, "Method Not Allowed"),
        ("GET", "/workers/hung", {}, 405, "Method Not Allowed"),  # which any web page can send
        ("DELETE", "/health", {}, 405, "GET and HEAD"),
        ("POST", "/metrics", {}, 405, "Method Not Allowed"),
    ],
)
async def test_errors_of_the_control_plane_have_the_shape_of_the_others(
    method: str, path: str, options: dict[str, Any], status: int, message: str
) -> None:
    async with routed(model_server("a")) as (_, _, session):
        found, error = await refused(session, method, path, **options)
    assert found == status
    assert message in error["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": "localhost:8080", "Origin": "http://localhost:8080"}, 200),
        ({"Host": "10.0.0.7:8080"}, 200),
        ({"Host": "localhost.:8080"}, 200),
        ({"Host": "localhost:80", "Origin": "http://localhost"}, 200),
        ({"Host": "localhost", "Origin": "http://localhost:80"}, 200),
        ({"Host": "localhost:8080", "Origin": "http://[::1"}, 403),
        ({"Host": "localhost:8080", "Origin": "http://localhost:8080, http://evil.example"}, 403),
        ({"Host": "localhost:8080", "Origin": "http://localhost:8081"}, 403),
        ({"Host": "abc", "Origin": "chrome-extension://abc"}, 403),
        ({"Host": "", "Origin": "null"}, 403),
        ({"Host": "localhost:8080", "X-Forwarded-Host": "evil.example", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost", "X-Forwarded-Host": "evil.example"}, 200),
        ({"Host": "2130706433"}, 403),
        ({"Host": "[::1]:8080"}, 200),
        ({"Host": socket.gethostname().upper()}, 200),
        ({}, 200),
    ],
)
async def test_web_pages_cannot_use_the_control_plane(headers: dict[str, str], status: int) -> None:
    async with routed(model_server("a"), model_server("a")) as (_, urls, session):
        async with session.delete("/workers", params={"url": urls[0]}, headers=headers) as response:
            assert response.status == status
        assert len(await listed(session)) == (2 if status == 403 else 1)
        async with session.post(CHAT, headers=headers) as response:
            assert response.status == 200


async def test_with_a_key_any_host_name_is_accepted() -> None:
    async with routed(model_server("a"), api_key="k") as (_, _, session):
        headers = {"Host": "router.cluster.local", "Origin": "http://dashboard.cluster.local"}
        async with session.post("/workers", json={"url": "http://x:1"}, headers=headers) as response:
            assert response.status == 201


async def test_bodies_of_the_control_plane_are_bounded() -> None:
    async with routed(model_server("a")) as (_, _, session):

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b" " * (1 << 20)

        for body in (b" " * (2 << 20), chunks()):
            status, error = await refused(session, "POST", "/workers", data=body)
            assert (status, error["message"]) == (413, f"the body is longer than {1 << 20} bytes")
