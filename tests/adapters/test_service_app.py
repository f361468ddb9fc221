"""The key, the bound on bodies, health and metrics."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
import requests

from reward_loop.adapters.service import app
from reward_loop.adapters.service.app import create_app
from reward_loop.adapters.service.service import RewardService
from tests.adapters.services import client_of, post, scorer
from tests.servers import serving

BODY = {"prompt": "2+2", "response": "4", "label": "4"}


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("bearer kéy", 200),
        ("Basic " + base64.b64encode("user:kéy".encode()).decode(), 200),
        ("Basic " + base64.b64encode("kéy:other".encode()).decode(), 401),
        ("Basic !", 401),
        ("Bearer other", 401),
        ("kéy", 401),
        (None, 401),
    ],
)
async def test_requests_need_the_key(header: str | None, status: int) -> None:
    async with client_of(key="kéy") as client:
        headers = {} if header is None else {"authorization": header.encode()}
        answer = await client.post("/slime", json=BODY, headers=headers)  # type: ignore[arg-type]
        assert answer.status_code == status
        assert status == 200 or "bearer token" in answer.json()["error"]


async def test_all_other_pages_but_health_checks_need_the_key() -> None:
    paths = {"/metrics": 401, "/docs": 401, "/openapi.json": 401, "/nowhere": 401, "/health": 200, "/ready": 200}
    async with client_of(key="key") as client:
        assert {path: (await client.get(path)).status_code for path in paths} == paths


async def test_clients_without_headers_of_their_own_send_the_key_in_the_url() -> None:
    service = RewardService(scorer())
    async with service, serving(create_app(service, key="key")) as url:
        with_key = url.replace("http://", "http://reward:key@") + "/slime"
        answer = await asyncio.to_thread(requests.post, with_key, json=BODY, timeout=60)
        assert (answer.status_code, answer.json()) == (200, 1.0)


async def test_a_body_that_is_too_long_is_an_error_also_without_a_length() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b'{"response": "' + b"x" * 1000

    async with client_of(max_body_bytes=10_000) as client:
        for content in (b"x" * 10_001, chunks()):
            answer = await client.post("/score", content=content)
            assert answer.status_code == 413
            assert "longer than 10000 bytes" in answer.json()["error"]
        await post(client, "/slime", BODY)


async def test_a_body_that_does_not_arrive_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    monkeypatch.setattr(app, "BODY_S", 0.05)
    async with client_of() as client:
        assert (await client.post("/score", content=endless())).status_code == 408


async def test_metrics_count_samples_by_outcome_and_answers_by_status() -> None:
    async with client_of() as client:
        for response in ("4", "raise"):
            await client.post("/slime", json={**BODY, "response": response})
        await client.post("/nowhere")
        answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    shown: dict[str, Any] = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if line[0] != "#")
    for name, value in {
        'reward_loop_service_samples_total{outcome="scored",path="/slime"}': 1,
        'reward_loop_service_samples_total{outcome="failed",path="/slime"}': 1,
        'reward_loop_service_requests_total{path="/slime",status="500"}': 1,
        'reward_loop_service_requests_total{path="other",status="404"}': 1,
        'reward_loop_service_request_seconds_count{path="/slime"}': 2,
        "reward_loop_service_in_flight": 0,
    }.items():
        assert float(shown[name]) == value


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}], ids=str
)
async def test_without_a_key_web_pages_are_refused(headers: dict[str, str]) -> None:
    async with client_of() as client:
        answer = await client.post("/slime", json=BODY, headers=headers)
        assert (answer.status_code, "--api-key-env" in answer.json()["error"]) == (403, True)
        own = {"Origin": "http://localhost:8090", "Host": "localhost:8090"}
        assert (await client.post("/slime", json=BODY, headers=own)).status_code == 200
    async with client_of(key="key") as client:
        headers = {"authorization": "Bearer key", **headers}
        assert (await client.post("/slime", json=BODY, headers=headers)).status_code == 200
