from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import orjson
import pytest

from reward_loop.router import app, pool, proxy
from reward_loop.router.config import BackendConfig, RouterConfig
from tests.support.clock import advance
from tests.support.gsm8k import ROOT
from tests.support.servers import CHAT, model_server, post, routed, routed_urls, served_by_router, serving


async def test_several_models_at_one_address() -> None:
    async with routed(model_server("judge"), model_server("scorer")) as (url, _, session):
        for name in ("judge", "scorer", "judge"):
            assert await post(url, CHAT, orjson.dumps({"model": name})) == (200, name.encode())
        status, body = await post(url, CHAT, b'{"model": "x"}')
        assert status == 404
        assert "available models: judge, scorer" in orjson.loads(body)["error"]["message"]
        async with session.get("/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["judge", "scorer"]


def adapters(names: list[str]) -> Any:
    """An app that lists `names`, which may change, and answers requests for these models only."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, status = (await receive())["body"], 200
        if scope["path"] == "/v1/models":
            asked.append(scope["path"])
            body = orjson.dumps({"data": [{"id": name} for name in names]})
        elif scope["path"] == CHAT:
            name = orjson.loads(body)["model"]
            status, body = (200, name.encode()) if name in names else (404, b"unknown model")
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    asked: list[str] = []
    app.asked = asked  # type: ignore[attr-defined]
    return app


@pytest.mark.parametrize("others", [["base"], ["other"]], ids=["same models", "different models"])
async def test_a_model_that_appears_later_is_found(others: list[str]) -> None:
    names = ["base"]
    servers = [adapters(names), adapters(others)]
    body = b'{"model": "adapter"}'
    async with routed(*servers) as (url, _, _):
        assert (await post(url, CHAT, body))[0] == 404
        names.append("adapter")
        await advance(pool._ASK_INTERVAL_S)
        answers = await asyncio.gather(*(post(url, CHAT, body) for _ in range(20)))
        assert answers == [(200, b"adapter")] * 20
        names.remove("adapter")
        others.append("adapter")
        await advance(pool._ASK_INTERVAL_S)
        assert [await post(url, CHAT, body) for _ in range(4)] == [(200, b"adapter")] * 4


async def test_unknown_names_are_asked_for_at_a_bounded_rate() -> None:
    server = adapters(["a"])
    async with routed(server, adapters(["b"])) as (url, _, _):
        before = len(server.asked)
        for number in range(50):
            assert (await post(url, CHAT, b'{"model": "unknown %d"}' % number))[0] == 404
        assert len(server.asked) - before <= 3  # one a second


async def test_a_configured_server_learns_the_name_of_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["base"]
    async with serving(adapters(names)) as one, serving(adapters(["other"])) as two:
        configs: Any = [BackendConfig(url=one, models=("base",)), BackendConfig(url=two, models=("other",))]
        async with routed_urls(configs) as url:
            names.append("adapter")
            assert await post(url, CHAT, b'{"model": "adapter"}') == (200, b"adapter")


async def test_without_the_key_nothing_but_health() -> None:
    seen: list[Any] = []
    async with routed(model_server("m", seen), api_key="k", worker_api_key="w") as (url, _, session):
        for path in (CHAT, "/workers", "/metrics"):
            assert (await post(url, path))[0] == 401
            assert (await post(url, path, headers={"Authorization": "Bearer K"}))[0] == 401
        async with aiohttp.ClientSession(url) as anyone:
            for path in ("/health", "/ready", "/live"):
                async with anyone.get(path) as response:
                    assert response.status == 200
        assert not seen
        async with session.post(CHAT) as response:
            assert response.status == 200
    assert [headers[b"authorization"] for headers in seen] == [b"Bearer w"]


async def test_trusted_addresses_need_no_key_and_all_others_do() -> None:
    async with routed(model_server("m"), trusted_addresses=("10.0.0.9", "127.0.0.1")) as (url, _, _):
        assert [(await post(url, path, b"{}"))[0] for path in (CHAT, "/v1/models")] == [200, 200]
    async with served_by_router(app.Router([], RouterConfig(trusted_addresses=("10.0.0.9",)))) as url:
        assert (await post(url, CHAT))[0] == 401
    async with routed(model_server("m"), trusted_addresses=("10.0.0.9",), api_key="k") as (url, _, session):
        assert (await post(url, CHAT))[0] == 401
        async with session.post(CHAT) as response:
            assert response.status == 200


async def test_bodies_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "_MAX_BODY_BYTES", 100)
    async with routed(model_server("m")) as (url, _, session):
        assert (await post(url, CHAT, b"x" * 101))[0] == 413

        async def chunks() -> Any:
            for _ in range(3):
                yield b"x" * 50

        async with session.post(CHAT, data=chunks()) as response:
            assert response.status == 413
        assert await post(url, CHAT, b"x" * 100) == (200, b"m")


@contextlib.contextmanager
def routing(*backends: str, files: int | None = None, **options: Any) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        [
            *([] if files is None else ["prlimit", f"--nofile={files}:{files}"]),
            *(sys.executable, "-m", "reward_loop.router.app", "--options", json.dumps(options)),
            *(part for url in backends for part in ("--worker", json.dumps({"url": url}))),
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield found[0], process
    finally:
        process.kill()
        process.communicate()


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body += message["body"]
        more = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize(
    ("files", "clients"), [(resource.RLIM_INFINITY, None), (65536, 32256), (4096, 1536), (256, 96)]
)
def test_no_more_clients_than_files_can_be_open(
    files: int, clients: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "raise_descriptor_limit", lambda: None)
    monkeypatch.setattr(app.resource, "getrlimit", lambda _: (files, files))
    assert app._max_connections() == clients


@pytest.mark.processes
async def test_more_clients_than_open_files_wait_and_none_is_reset() -> None:
    async def quick(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.01)
        await model_server("m")(scope, receive, send)

    async def ask(url: str, *, closes: bool) -> bytes:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        connection = b"close" if closes else b"keep-alive"
        writer.write(b"GET /x HTTP/1.1\r\nhost: h\r\nconnection: " + connection + b"\r\n\r\n")
        line = await reader.readline()
        if closes:
            writer.close()
        else:
            idle.append(writer)  # as in a client's pool
        return line

    idle: list[asyncio.StreamWriter] = []
    async with serving(quick) as backend:
        with routing(backend, files=256) as (url, _):
            async with asyncio.timeout(60):
                for closes in (True, False, True):
                    lines = await asyncio.gather(*(ask(url, closes=closes) for _ in range(600)))
                    assert set(lines) == {b"HTTP/1.1 200 OK\r\n"}
    for writer in idle:
        writer.close()


@pytest.mark.processes
async def test_sigterm_cancels_the_requests_in_flight() -> None:
    arrived, left = asyncio.Event(), asyncio.Event()

    async def hanging(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            await receive()
            arrived.set()
            assert (await receive())["type"] == "http.disconnect"
            left.set()
        else:
            await echo(scope, receive, send)

    async with serving(hanging) as backend:
        with routing(backend) as (url, process):
            await _is_ready(url)
            request = asyncio.create_task(post(url, "/slow", b"x"))
            await arrived.wait()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == 0
            with pytest.raises(aiohttp.ClientError):
                await request
            await left.wait()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "0.0.0.0"), "can be reached from other machines: set an API key"),
        (("--worker", '{"url": "127.0.0.1:1"}'), "expected http://host:port"),
        (("--options", '{"max_failed_check": 2}'), "did you mean 'max_failed_checks'"),
    ],
)
def test_wrong_options_end_the_router(options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["router", *options])
    with pytest.raises(SystemExit, match=message):
        app.main()


async def _is_ready(url: str) -> None:
    """Returns once a server is in use."""
    async with aiohttp.ClientSession(url) as session, asyncio.timeout(30):
        while (await session.get("/ready")).status != 200:  # noqa: ASYNC110 (it happens in another process)
            await asyncio.sleep(0.01)
