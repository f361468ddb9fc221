from __future__ import annotations

from typing import Any

import pytest

from reward_loop.config import ServedModelConfig
from reward_loop.serving.manager import ModelServer, RouterClient

MODEL = ServedModelConfig(model_path="judge", engine="vllm", served_model_name="judge")


class RecordingRouter(RouterClient):
    """Records the requests to the router instead of sending them."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    async def report(self, method: str, path: str, body: Any = None) -> None:
        self.requests.append(f"{method} {path}" if body is None else f"{method} {path} {body['url']}")


@pytest.fixture
async def router() -> RecordingRouter:
    return RecordingRouter()


async def test_a_server_in_ray_is_added_when_its_address_is_known_and_replaced_when_it_changes(
    router: RecordingRouter,
) -> None:
    server = ModelServer(MODEL, None, router)
    await server.on_down("not ready yet")
    assert router.requests == []
    await server.on_up("http://a:1")
    assert router.requests == ["POST /workers http://a:1"]
    router.requests.clear()
    await server.on_up("http://b:2")
    assert router.requests == ["POST /workers http://b:2", "DELETE /workers?url=http%3A%2F%2Fa%3A1"]
    router.requests.clear()
    await server.on_down("exited with status 4")
    assert router.requests == ["POST /workers/mark_dead?url=http%3A%2F%2Fb%3A2&reason=exited+with+status+4"]
