from __future__ import annotations

import asyncio
from typing import Any

import pytest

from reward_loop.config import ServedModelConfig
from reward_loop.errors import ServerError
from reward_loop.serving import model_server
from reward_loop.serving.model_server import ModelServer, RouterClient

MODEL = ServedModelConfig(model_path="judge", engine="vllm", served_model_name="judge", enable_sleep_mode=True)


class RecordingRouter(RouterClient):
    """Records the requests to the router, and to the servers, instead of sending them."""

    def __init__(self) -> None:
        super().__init__("http://router", asyncio.get_running_loop().create_future(), 1.0)
        self.started.set_result(None)
        self.requests: list[str] = []

    async def _request(self, method: str, path: str, body: Any = None) -> None:
        self.requests.append(f"{method} {path}" if body is None else f"{method} {path} {body['url']}")

    async def require(self, action: str, url: str) -> None:
        self.requests.append(f"{action} {url}")


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> RecordingRouter:
    router = RecordingRouter()

    async def send(url: str, path: str, timeout_s: float) -> None:
        router.requests.append(f"POST {url}{path}")

    monkeypatch.setattr(model_server, "_send", send)
    return router


async def test_a_server_in_ray_is_added_when_its_address_is_known_and_replaced_when_it_changes(
    router: RecordingRouter,
) -> None:
    server = ModelServer(MODEL, None, router)
    await server.on_down("not ready yet")
    await server.sleep()  # has no effect before the first start
    assert router.requests == []
    await server.on_up("http://a:1")
    assert router.requests == ["POST /workers http://a:1"]
    router.requests.clear()
    await server.on_up("http://b:2")
    assert router.requests == ["POST /workers http://b:2", "DELETE /workers?url=http%3A%2F%2Fa%3A1"]


async def test_a_server_that_restarts_asleep_at_another_address_stays_asleep(router: RecordingRouter) -> None:
    server = ModelServer(MODEL, "http://a:1", router)
    await server.sleep()
    assert router.requests == ["sleep http://a:1", "POST http://a:1/sleep?level=1"]
    router.requests.clear()
    await server.on_up("http://b:2")
    assert router.requests == [
        "POST http://b:2/sleep?level=1",
        "POST /workers http://b:2",
        "POST /workers/sleep?url=http%3A%2F%2Fb%3A2",
        "DELETE /workers?url=http%3A%2F%2Fa%3A1",
    ]
    router.requests.clear()
    await server.wake()
    assert router.requests == ["POST http://b:2/wake_up", "resume http://b:2"]


async def test_a_server_that_does_not_sleep_is_not_woken(router: RecordingRouter) -> None:
    server = ModelServer(MODEL, "http://a:1", router)
    await server.wake()
    assert router.requests == ["resume http://a:1"]


async def test_a_server_that_died_asleep_and_is_not_up_yet_is_not_woken(router: RecordingRouter) -> None:
    server = ModelServer(MODEL, "http://a:1", router)
    await server.sleep()
    await server.on_down("was killed by SIGKILL")
    router.requests.clear()
    await server.wake()
    await server.on_up("http://a:1")
    assert router.requests == ["resume http://a:1"]


async def test_sglang_is_paused_before_it_frees_its_memory_and_continues_when_it_has_it_again(
    router: RecordingRouter,
) -> None:
    server = ModelServer(MODEL.model_copy(update={"engine": "sglang"}), "http://a:1", router)
    await server.sleep()
    await server.wake()
    assert router.requests == [
        "sleep http://a:1",
        "POST http://a:1/pause_generation",
        "POST http://a:1/flush_cache?timeout=60",
        "POST http://a:1/release_memory_occupation",
        "POST http://a:1/resume_memory_occupation",
        "POST http://a:1/continue_generation",
        "resume http://a:1",
    ]


@pytest.mark.parametrize("refusals", [1, 3])
async def test_sglang_is_paused_again_if_it_still_computes_and_stays_awake_if_it_never_ends(
    router: RecordingRouter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusals: int
) -> None:
    answers = iter([400] * refusals)

    async def send(url: str, path: str, timeout_s: float) -> None:
        router.requests.append(path)
        if path.startswith("/flush_cache") and next(answers, 200) == 400:
            raise ServerError("was answered with status 400: Flush cache failed.")

    monkeypatch.setattr(model_server, "_send", send)
    monkeypatch.setattr(model_server, "_BETWEEN_ATTEMPTS_S", 0.0)
    server = ModelServer(MODEL.model_copy(update={"engine": "sglang"}), "http://a:1", router)
    await server.sleep()
    await server.wake()
    paused = ["/pause_generation", "/flush_cache?timeout=60"]
    released = ["/release_memory_occupation", "/resume_memory_occupation"]
    expected = paused * 2 + released if refusals == 1 else paused * 3
    assert router.requests == ["sleep http://a:1", *expected, "/continue_generation", "resume http://a:1"]
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == (refusals == 3)
    for warning in warnings:
        assert warning.startswith("model judge at http://a:1 is not asleep")
        assert "status 400" in warning


async def test_a_restarted_router_gets_the_reason_why_a_server_is_lost(router: RecordingRouter) -> None:
    server = ModelServer(MODEL, "http://a:1", router)
    await server.on_lost("exited with status 4")
    await server.send_state()
    sent = "POST /workers/mark_dead?url=http%3A%2F%2Fa%3A1&reason=exited+with+status+4&lost=true"
    assert router.requests == [sent] * 2
