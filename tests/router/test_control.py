from __future__ import annotations

from typing import Any

from reward_loop.router import app, control
from tests.servers import CHAT, listed, model_server, post, routed, serving


def test_the_router_passes_on_the_paths_that_the_control_plane_has() -> None:
    nothing: Any = None
    routes: Any = control.control_plane(nothing, nothing).routes
    assert {route.path for route in routes} == app._CONTROL_PATHS


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
        counts = {backend["url"]: backend["requests"] for backend in await listed(session)}
        assert counts == {urls[0]: 0, other: 3}
        async with session.delete("/workers", params={"url": urls[0]}) as response:
            assert response.status == 202
        assert [backend["url"] for backend in await listed(session)] == [other]
        async with session.delete("/workers", params={"url": urls[0]}) as response:
            assert response.status == 404


async def test_health_is_that_of_the_servers_and_life_its_own() -> None:
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
