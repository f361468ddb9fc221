from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest
from yarl import URL

from reward_loop._util.web_server import listen, url_of
from reward_loop.client.http import BACKEND_HEADER, GROUP_HEADER
from reward_loop.router.app import Router
from reward_loop.router.backend import Backend
from reward_loop.router.config import BackendConfig, RouterConfig
from tests.support.clock import hastened
from tests.support.servers import post, refusing, resetting, served_by_router, serving, until


@asynccontextmanager
async def proxied(
    *backends: str | BackendConfig, timeout_s: float = 30, probe: Callable[[str], Any] | None = None, **options: Any
) -> AsyncIterator[str]:
    """A router in front of backends that are taken to be well."""

    async def well(backend: Backend) -> None:
        if probe:
            await probe(backend.url)

    configs = [BackendConfig(url=backend) if isinstance(backend, str) else backend for backend in backends]
    config = RouterConfig(request_timeout_s=timeout_s, **options)
    async with served_by_router(Router(configs, config, well)) as url:
        yield url


async def well(backend: Backend) -> None:
    pass


def answering(status: int = 200, headers: dict[str, str] | None = None, body: bytes = b"ok") -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body})

    return app


async def mirror(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what it got: the target and headers as JSON, or the body where there is one."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message["body"]
        more = message["more_body"]
    if scope["path"] != "/echo":
        seen = {"method": scope["method"], "path": scope["raw_path"].decode(), "query": scope["query_string"].decode()}
        body = orjson.dumps({**seen, "headers": {k.decode(): v.decode() for k, v in scope["headers"]}})
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def test_bodies_arrive_byte_for_byte() -> None:
    async with serving(mirror) as backend, proxied(backend) as url:
        for body in (b"", b"\x00\r\n\xff", bytes(range(256)) * 1200):
            assert await post(url, "/echo", body) == (200, body)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_method_path_and_query_are_untouched(method: str) -> None:
    async with serving(mirror) as backend, proxied(backend) as url, aiohttp.ClientSession() as session:
        target = "/a%2Fb/../c//d?x=%20+y&z"
        async with session.request(method, URL(url + target, encoded=True)) as response:
            seen = await response.json(content_type=None)
    assert (seen["method"], seen["path"], seen["query"]) == (method, "/a%2Fb/../c//d", "x=%20+y&z")


async def test_headers_go_through_except_those_of_the_connection() -> None:
    sent = {
        "Authorization": "Bearer x",
        "X-Own": "ü",
        "Connection": "keep-alive, X-Private",
        "X-Private": "1",
        "Proxy-Authorization": "secret",
        "TE": "trailers",
    }
    async with (
        serving(mirror) as backend,
        proxied(backend) as url,
        aiohttp.ClientSession() as session,
        session.get(url, headers=sent, skip_auto_headers=["Accept", "User-Agent"]) as response,
    ):
        seen = (await response.json(content_type=None))["headers"]
    assert seen["authorization"] == "Bearer x"
    assert seen["x-own"] == "ü"
    assert seen["host"] == backend.removeprefix("http://")
    assert not {"x-private", "proxy-authorization", "te", "accept", "user-agent"} & set(seen)


@pytest.mark.parametrize("status", [204, 301, 400, 404, 422, 500, 503])
async def test_statuses_and_bodies_of_backends_are_unchanged(status: int) -> None:
    body = b"" if status == 204 else b'{"error": {"message" : "no"}}'
    headers = {"Content-Type": "application/json; odd=1", "Location": "/elsewhere", "Keep-Alive": "timeout=1"}
    if body:
        headers["Content-Length"] = str(len(body))
    async with (
        serving(answering(status, headers, body)) as backend,
        proxied(backend) as url,
        aiohttp.ClientSession() as session,
        session.post(url, allow_redirects=False) as response,
    ):
        assert (response.status, await response.read()) == (status, body)
        assert response.headers["Content-Type"] == "application/json; odd=1"
        assert "Keep-Alive" not in response.headers
        assert "Date" not in response.headers


async def test_chunks_are_passed_on_as_they_come() -> None:
    more = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await more.wait()
        await send({"type": "http.response.body", "body": b"data: 2\n\n"})

    async with (
        serving(app) as backend,
        proxied(backend) as url,
        aiohttp.ClientSession() as session,
        session.post(url) as response,
    ):
        assert await response.content.readany() == b"data: 1\n\n"
        more.set()
        assert await response.content.read() == b"data: 2\n\n"


async def test_the_only_server_gets_a_request_again_whose_connection_was_stale() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            await reader.readuntil(b"\r\n\r\n")  # It closes the connection without an answer.
        writer.close()

    server = await asyncio.start_server(serve, sock=(listener := listen("127.0.0.1")))
    async with server, proxied(url_of(listener)) as url:
        assert [await post(url) for _ in range(4)] == [(200, b"ok")] * 4


async def test_a_request_waits_for_its_backend_to_come_back() -> None:
    down, back = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        # Without an answer, uvicorn closes a connection whose response has begun.
        if back.is_set():
            await answering()(scope, receive, send)
        else:
            headers = [(b"content-length", b"2")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def probe(url: str) -> None:
        if probes := probed.count(url):
            assert probes == 1
            down.set()
            await back.wait()
        probed.append(url)

    probed: list[str] = []
    async with serving(app) as backend, proxied(backend, probe=probe) as url:
        request = asyncio.create_task(post(url))
        await down.wait()
        assert not request.done()
        back.set()
        assert await request == (200, b"ok")


async def test_without_a_backend_until_the_deadline_the_503_has_the_reason() -> None:
    async def unwell(url: str) -> None:
        raise ConnectionRefusedError("nobody there")

    backend = refusing()
    async with proxied(backend, probe=unwell, timeout_s=0.1) as url:
        status, body = await post(url)
    assert status == 503
    assert f"{backend} is down (ConnectionRefusedError: nobody there)".encode() in body


async def test_a_request_that_breaks_every_connection_is_given_up() -> None:
    async with resetting() as backend, proxied(backend) as url:
        status, body = await hastened(post(url))
    assert status == 502
    assert backend.encode() in body


async def silent(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.parametrize("begun", [b"", b"1"])
async def test_a_client_that_does_not_send_its_body_gets_a_408(begun: bytes) -> None:
    async with serving(silent) as backend, proxied(backend, timeout_s=0.1) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n" + begun)
        async with asyncio.timeout(30):
            answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_backend_that_is_too_slow_gives_a_504_that_names_it() -> None:
    async with serving(silent) as backend, proxied(backend, timeout_s=1) as url:
        status, body = await hastened(post(url))
    assert status == 504
    assert backend.encode() in body


async def test_an_answer_that_breaks_off_is_not_passed_off_as_complete() -> None:
    async def half(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    async with serving(half) as backend, proxied(backend) as url:
        with pytest.raises(aiohttp.ClientPayloadError):
            await post(url)


async def test_a_client_that_leaves_cancels_the_backends_request() -> None:
    arrived, left = asyncio.Event(), asyncio.Event()
    paths = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        if scope["path"] == "/slow":
            await receive()
            arrived.set()
            assert (await receive())["type"] == "http.disconnect"
            left.set()
        else:
            await answering()(scope, receive, send)

    async with serving(app) as backend, proxied(backend) as url:
        await post(url, "/first")
        request = asyncio.create_task(post(url, "/slow"))
        await arrived.wait()
        request.cancel()
        async with asyncio.timeout(60):
            await left.wait()
        await post(url, "/last")
    assert paths == ["/first", "/slow", "/last"]


async def test_requests_are_not_counted_after_their_end() -> None:
    arrived = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        match scope["path"]:
            case "/slow":
                arrived.set()
                while (await receive())["type"] != "http.disconnect":
                    pass
            case "/broken":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
            case path:
                await answering(int(path[1:]))(scope, receive, send)

    async with serving(app) as backend:
        router, hasty = Router([backend], check=well), Router([backend], RouterConfig(request_timeout_s=1), well)
        async with served_by_router(router) as url, served_by_router(hasty) as hasty_url:
            for status in (200, 429, 500, 204, 200):
                assert (await post(url, f"/{status}"))[0] == status
                await until(router.pool.pick)
            with pytest.raises(aiohttp.ClientPayloadError):
                await post(url, "/broken")
            leaving = asyncio.create_task(post(url, "/slow"))
            await arrived.wait()
            leaving.cancel()
            assert (await hastened(post(hasty_url, "/slow")))[0] == 504
            for one in (router, hasty):
                await until(lambda: not one.pool.backends[0].in_flight)  # noqa: B023


async def test_websockets_are_refused() -> None:
    async with serving(mirror) as backend, proxied(backend) as url:
        assert (await post(url, headers={"Connection": "upgrade", "Upgrade": "websocket"}))[0] == 501


async def test_paths_that_only_resemble_those_of_the_control_plane_are_forwarded() -> None:
    async with serving(mirror) as backend, proxied(backend) as url, aiohttp.ClientSession(url) as session:
        for path in ("/classify", "/docs", "/openapi.json", "/health/", "/"):
            async with session.get(path) as response:
                assert (await response.json(content_type=None))["path"] == path


@pytest.mark.parametrize(("path", "servers"), [("/v1/chat/completions", 1), ("/v1/completions", 1), ("/classify", 2)])
async def test_with_affinity_generative_requests_of_a_group_go_to_one_server(path: str, servers: int) -> None:
    async with AsyncExitStack() as stack:
        backends = [await stack.enter_async_context(serving(answering(body=b"%d" % n))) for n in range(2)]
        url = await stack.enter_async_context(proxied(*backends, policy="affinity"))
        bodies = [(await post(url, path, b"{}", headers={GROUP_HEADER: "7"}))[1] for _ in range(6)]
    assert len(set(bodies)) == servers


async def test_an_answer_names_the_server_that_gave_it() -> None:
    async with (
        serving(answering(503)) as broken,
        serving(answering(200, {"x-own": "1"})) as well,
        proxied(broken, well) as url,
        aiohttp.ClientSession() as session,
    ):
        for _ in range(4):  # the first server in turn may be either
            async with session.post(f"{url}/v1/chat/completions", json={}) as response:
                assert response.status == 200
                assert response.headers.getall(BACKEND_HEADER) == [well]
                assert response.headers["x-own"] == "1"
