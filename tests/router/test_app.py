from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from reward_loop.router.app import create_app
from reward_loop.router.config import RouterConfig, WorkerConfig
from tests.router.serving import post, served_by_router, serving

pytestmark = pytest.mark.usefixtures("way")


def model_server(name: str, seen: list[Any] | None = None, status: int = 200, headers: Any = ()) -> Any:
    """Lists one model, and answers with its name, or with a status once it is up."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        body = name.encode()
        answer = 200
        if scope["path"] == "/v1/models":
            body = orjson.dumps({"object": "list", "data": [{"id": name, "object": "model"}]})
        elif scope["path"] not in ("/health", "/is_sleeping"):
            answer = status
            if seen is not None:
                seen.append(dict(scope["headers"]))
        raw = [(b"content-length", b"%d" % len(body)), *headers]
        await send({"type": "http.response.start", "status": answer, "headers": raw})
        await send({"type": "http.response.body", "body": body})

    return app


@asynccontextmanager
async def routed(*workers: Any, wait_for: int | None = None, **options: Any) -> Any:
    """The router in front of ASGI apps, once all of them are in use; yields its URL and theirs."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(worker)) for worker in workers]
        url = await stack.enter_async_context(served_by_router(create_app(urls, RouterConfig(**options))))
        headers = {"authorization": f"Bearer {options['api_key']}"} if "api_key" in options else {}
        session = await stack.enter_async_context(aiohttp.ClientSession(url, headers=headers))
        async with asyncio.timeout(30):
            while [w["state"] for w in await listed(session)] != ["up"] * len(urls):  # noqa: ASYNC110
                await asyncio.sleep(0)
        yield url, urls, session


async def listed(session: aiohttp.ClientSession) -> list[dict[str, Any]]:
    async with session.get("/workers") as response:
        workers: list[dict[str, Any]] = await response.json()
        return workers


CHAT = "/v1/chat/completions"


async def test_several_models_at_one_address() -> None:
    async with routed(model_server("judge"), model_server("scorer")) as (url, _, session):
        for name in ("judge", "scorer", "judge"):
            assert await post(url, CHAT, orjson.dumps({"model": name})) == (200, name.encode())
        status, body = await post(url, CHAT, b'{"model": "x"}')
        assert status == 404
        assert "there are: judge, scorer" in orjson.loads(body)["error"]["message"]
        async with session.get("/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["judge", "scorer"]


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_failed_request_is_tried_on_another_server(status: int) -> None:
    async with routed(model_server("m", status=status), model_server("m")) as (url, urls, session):
        assert [await post(url, CHAT, b"{}") for _ in range(4)] == [(200, b"m")] * 4
        first = (await listed(session))[0]
    assert first["url"] == urls[0]
    assert first["resting"] is (status == 429)


async def test_without_another_server_its_answer_is_passed_on_and_its_pause_is_kept() -> None:
    seen: list[Any] = []
    server = model_server("m", seen, 429, [(b"retry-after", b"30")])
    async with routed(server) as (_, _, session):
        for _ in range(2):
            async with session.post(CHAT, data=b"{}") as response:
                assert response.status == 429
                assert 28 <= int(response.headers["Retry-After"]) <= 30
    assert len(seen) == 1


async def test_failures_are_not_retried_beyond_the_budget() -> None:
    seen: list[Any] = []
    servers = [model_server("m", seen, 500) for _ in range(2)]
    async with routed(*servers, retry_share=0.0, max_failures=100) as (url, _, _):
        assert [(await post(url, CHAT))[0] for _ in range(3)] == [500] * 3
    assert len(seen) == 3


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


async def test_the_key_goes_nowhere() -> None:
    seen: list[Any] = []
    async with routed(model_server("m", seen), api_key="k") as (_, _, session), session.post(CHAT) as response:
        assert response.status == 200
    assert b"authorization" not in seen[0]


async def test_bodies_and_requests_beyond_the_limits() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == CHAT:
            entered.set()
            await leave.wait()
        await model_server("m")(scope, receive, send)

    async with routed(slow, max_body_bytes=100, max_in_flight=1, max_queue=0) as (url, _, session):
        assert (await post(url, CHAT, b"x" * 101))[0] == 413

        async def chunks() -> Any:
            for _ in range(3):
                yield b"x" * 50

        async with session.post(CHAT, data=chunks()) as response:
            assert response.status == 413
        first = asyncio.create_task(post(url, CHAT, b"x" * 100))
        await entered.wait()
        async with session.post(CHAT) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
        leave.set()
        assert await first == (200, b"m")


async def test_servers_come_and_go_while_it_runs() -> None:
    async with routed(model_server("a")) as (url, urls, session), serving(model_server("a")) as other:
        async with session.post("/workers", json={"url": other, "kind": "generative"}) as response:
            assert response.status == 201
        async with session.post("/workers", json={"url": other}) as response:
            assert response.status == 409
        async with session.post("/workers", json={"url": "ftp://x"}) as response:
            assert response.status == 422
        async with session.post("/workers/drain", params={"url": urls[0]}) as response:
            assert (await response.json())["state"] == "draining"
        assert [(await post(url, CHAT))[0] for _ in range(3)] == [200] * 3
        counts = {worker["url"]: worker["requests"] for worker in await listed(session)}
        assert counts == {urls[0]: 0, other: 3}
        async with session.delete("/workers", params={"url": urls[0]}) as response:
            assert response.status == 202
        assert [worker["url"] for worker in await listed(session)] == [other]
        async with session.delete("/workers", params={"url": urls[0]}) as response:
            assert response.status == 404


async def test_metrics() -> None:
    async with routed(model_server("m")) as (url, urls, session):
        await post(url, CHAT)
        async with session.get("/metrics") as response:
            text = await response.text()
    samples = {
        (sample.name, sample.labels.get("status") or sample.labels.get("state") or sample.labels.get("le")): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    answers = samples["reward_loop_router_answers_total", "200"]
    assert (answers.value, answers.labels["worker"], answers.labels["model"]) == (1, urls[0], "m")
    assert samples["reward_loop_router_worker_state", "up"].value == 1
    assert samples["reward_loop_router_latency_seconds_bucket", "+Inf"].value == 1


async def test_a_sleeping_vllm_gets_no_requests() -> None:
    async def asleep(scope: Any, receive: Any, send: Any) -> None:
        body = b'{"is_sleeping": true}' if scope["path"] == "/is_sleeping" else b"{}"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async with serving(asleep) as worker:
        app = create_app([WorkerConfig(url=worker, engine="vllm")], RouterConfig(request_timeout_s=0.3))
        async with serving(app) as url:
            status, body = await post(url, CHAT)
    assert status == 503
    assert b"the engine sleeps" in body
