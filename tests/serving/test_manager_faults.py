"""A reward model under load whose servers are killed or frozen, and which is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import pytest

from reward_loop.client.http import post
from reward_loop.config import RewardModelConfig
from reward_loop.serving import RewardModelManager, supervisor
from reward_loop.serving.engines import Transformers
from reward_loop.serving.process import ServerProcess
from tests.servers import STUB_COMMAND, listed

pytestmark = pytest.mark.integration  # starts servers

CALLERS = 64
TEXTS = [str(number) for number in range(CALLERS)]


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transformers, "command", lambda *_: STUB_COMMAND)


@contextlib.asynccontextmanager
async def served(
    folder: Path, delay_s: float, **options: Any
) -> AsyncIterator[tuple[RewardModelManager, aiohttp.ClientSession]]:
    """Two stub servers behind a router, and a client of it."""
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    env = {"STUB_DELAY": str(delay_s)}
    paths = {"model_path": str(folder), "log_dir": str(folder / "logs")}
    config = RewardModelConfig(**paths, replicas=2, env=env, start_timeout_s=300, **options)
    async with RewardModelManager(config) as models:
        url = f"http://{models.reward_router_address}"
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
            yield models, session


async def echo(session: aiohttp.ClientSession, text: str) -> str:
    async with session.post("/echo", data=text) as response:
        assert response.status == 200, await response.text()
        return await response.text()


async def all_sent(session: aiohttp.ClientSession) -> list[asyncio.Task[str]]:
    """A request of each caller, once the servers have got all of them."""
    before = await sent(session)
    requests = [asyncio.create_task(echo(session, text)) for text in TEXTS]
    async with asyncio.timeout(60):
        while await sent(session) < before + CALLERS:  # noqa: ASYNC110 (another process counts)
            await asyncio.sleep(0.01)
    return requests


async def sent(session: aiohttp.ClientSession) -> int:
    return sum(backend["requests"] for backend in await listed(session))


async def test_requests_of_a_killed_server_do_not_wait_for_its_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 600.0)
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE_S", 600.0)
    async with served(tmp_path, 0.5) as (models, session):
        for _ in range(2):  # The second time, the connections to the servers are used ones.
            requests = await all_sent(session)
            await asyncio.gather(*requests)
        requests = await all_sent(session)
        os.kill(models.pids()["server 1"], signal.SIGKILL)
        async with asyncio.timeout(120):
            assert await asyncio.gather(*requests) == TEXTS
            assert await asyncio.gather(*(echo(session, text) for text in TEXTS)) == TEXTS


async def test_calls_of_the_client_survive_a_killed_router(tmp_path: Path) -> None:
    callers = 256
    async with served(tmp_path, 2.0) as (models, session):
        before, router = await sent(session), models.pids()["router"]
        bodies = [{"caller": number} for number in range(callers)]
        calls = [asyncio.create_task(post(models.reward_router_address, "/echo", body)) for body in bodies]
        async with asyncio.timeout(60):
            while await sent(session) < before + callers:  # noqa: ASYNC110 (another process counts)
                await asyncio.sleep(0.01)
        os.kill(router, signal.SIGKILL)
        async with asyncio.timeout(120):
            assert [answer for answer, _ in await asyncio.gather(*calls)] == bodies
        assert models.pids()["router"] != router


async def test_requests_beyond_max_in_flight_wait_in_the_router(tmp_path: Path) -> None:
    async with asyncio.timeout(120), served(tmp_path, 600, max_in_flight=2) as (_, session):
        requests = [asyncio.create_task(echo(session, text)) for text in TEXTS]
        while await gauge(session, "requests_queued") < CALLERS - 2:  # noqa: ASYNC110 (another process counts)
            await asyncio.sleep(0.01)
        assert await gauge(session, "worker_in_flight") == 2
        for request in requests:
            request.cancel()


async def gauge(session: aiohttp.ClientSession, name: str) -> float:
    """The sum of a gauge of the router over all servers."""
    async with session.get("/metrics") as response:
        found = re.findall(rf"^reward_loop_router_{name}\S* (\S+)$", await response.text(), re.MULTILINE)
    return sum(map(float, found))


async def test_requests_of_a_frozen_server_are_answered_by_another_one(tmp_path: Path) -> None:
    checks: Any = {"health_interval_s": 0.2, "health_timeout_s": 2, "max_failed_checks": 2}
    async with served(tmp_path, 0.5, **checks) as (models, session):
        requests = await all_sent(session)
        frozen = models.pids()["server 1"]
        os.kill(frozen, signal.SIGSTOP)
        try:
            async with asyncio.timeout(120):
                assert await asyncio.gather(*requests) == TEXTS
        finally:
            os.kill(frozen, signal.SIGCONT)


async def test_the_router_is_stopped_before_its_servers_and_does_not_wait_for_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []
    stop = ServerProcess.__aexit__

    async def recorded(
        process: ServerProcess,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stopped.append(process.name)
        await stop(process, exc_type, exc, traceback)
        stopped.append(f"{process.name} has ended")

    monkeypatch.setattr(ServerProcess, "__aexit__", recorded)
    monkeypatch.setattr("reward_loop.serving.manager._ROUTER_STOPS_WITHIN_S", 60.0)
    async with asyncio.timeout(120), served(tmp_path, 600) as (models, session):
        requests = await all_sent(session)
        await models.stop()
        results = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(result, aiohttp.ClientError) for result in results)
    assert stopped[:2] == ["reward router", "reward router has ended"]
    assert len(stopped) == 6
