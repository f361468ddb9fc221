from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from reward_loop.client.http import post as client_post
from reward_loop.config import RewardModelConfig
from reward_loop.errors import ConfigError, ServerStartError
from reward_loop.serving import RewardModelManager, serve_reward_model, supervisor
from reward_loop.serving.engines import Transformers
from reward_loop.serving.process import ServerProcess
from tests.support.servers import STUB_COMMAND, Watched, listed, post, refusing, until

pytestmark = pytest.mark.integration  # starts servers

ROOT = Path(__file__).parents[2]
CALLERS = 64
TEXTS = [str(number) for number in range(CALLERS)]


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Makes configurations for a model that the stub servers never look at."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')

    def make(**options: Any) -> RewardModelConfig:
        paths = {"model_path": str(tmp_path / "model"), "log_dir": str(tmp_path / "logs")}
        return RewardModelConfig(**(paths | {"start_timeout_s": 300} | options))

    return make


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transformers, "command", lambda *_: STUB_COMMAND)


def kill(models: RewardModelManager, role: str) -> int:
    """Kill a process; return its id."""
    pid = models.pids()[role]
    os.kill(pid, signal.SIGKILL)
    return pid


async def returned(models: RewardModelManager, role: str, before: int) -> None:
    """Wait until a killed process runs again."""
    await until(lambda: models.pids().get(role) not in (before, None))


@pytest.mark.usefixtures("stubs")
@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_killed_server_costs_no_request_and_comes_back(
    config: Any, caplog: pytest.LogCaptureFixture, replicas: int
) -> None:
    caplog.set_level(logging.INFO, "reward_loop")
    async with RewardModelManager(config(replicas=replicas, env={"STUB_DELAY": "0.02"})) as models:
        url = f"http://{models.reward_router_address}"
        answers = [asyncio.create_task(post(url, "/echo", str(i).encode())) for i in range(200)]
        await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        killed = kill(models, "server 1")
        assert await asyncio.gather(*answers) == [(200, str(i).encode()) for i in range(200)]
        await returned(models, "server 1", killed)
        seen = set()
        async with asyncio.timeout(120), aiohttp.ClientSession(url) as session:
            while models.pids()["server 1"] not in seen:  # the router uses it again
                async with session.get("/pid") as response:
                    seen.add(int(await response.read()))
        watched = Watched(list(models.pids().values()))
    assert watched.left_after(0) == 0
    watched.close()
    assert f"reward model server 1/{replicas} ready in" in caplog.text
    assert "was killed by SIGKILL" in caplog.text


@pytest.mark.usefixtures("stubs")
async def test_a_killed_router_restarts_at_its_address_while_a_server_waits_for_its_restart(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_MAX_RESTARTS", 1)
    async with RewardModelManager(config(replicas=2)) as models:
        url = f"http://{models.reward_router_address}"
        await returned(models, "server 1", kill(models, "server 1"))
        kill(models, "server 1")
        while await _state(url, 0) != "down":
            pass
        router = kill(models, "router")
        assert await _until(url, 200) == b"x"
        assert models.pids()["router"] != router
        assert await _state(url, 0) == "down"
        assert await post(url, "/echo", b"x") == (200, b"x")


async def test_a_folder_for_logs_that_cannot_be_created_is_named() -> None:
    config = RewardModelConfig(engine="external", urls=(refusing(),), log_dir="/dev/full/logs")
    with pytest.raises(ConfigError, match=r"log_dir='/dev/full/logs': .*/dev/full"):
        await RewardModelManager(config).__aenter__()


@pytest.mark.usefixtures("stubs")
async def test_a_server_that_answers_nothing_is_restarted(config: Any, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    options = {"request_timeout_s": 0.5, "health_interval_s": 0.1, "env": {"STUB_HANGS": str(hangs)}}
    async with RewardModelManager(config(**options)) as models, asyncio.timeout(60):
        url, before = f"http://{models.reward_router_address}", models.pids()["server 1"]
        assert await post(url, "/echo", b"x") == (200, b"x")
        hangs.touch()
        answers = await asyncio.gather(*(post(url, "/echo", b"y") for _ in range(3)))
        assert [status for status, _ in answers] == [504] * 3
        await until(lambda: models.pids().get("server 1") != before)
        hangs.unlink()
        await until_answered(url)


async def until_answered(url: str) -> None:
    while await post(url, "/echo", b"z") != (200, b"z"):  # noqa: ASYNC110 (it happens in another process)
        await asyncio.sleep(0.05)


async def _state(url: str, worker: int) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/workers") as response:
        return (await response.json())[worker]["state"]


async def _until(url: str, status: int) -> bytes:
    """The body of the first answer with a status; a dying router or server may give others before."""
    async with asyncio.timeout(120):
        while True:
            try:
                answer, body = await post(url, "/echo", b"x")
            except aiohttp.ClientError:
                continue
            if answer == status:
                return body


@pytest.mark.usefixtures("stubs")
async def test_a_server_that_does_not_start_shows_its_log_and_leaves_nothing(config: Any) -> None:
    models = RewardModelManager(config(replicas=2, env={"STUB_EXIT": "4"}))
    with pytest.raises(ServerStartError, match=r"server \d/2 exited with status 4") as raised:
        await models.__aenter__()
    assert "the stub is told to fail" in str(raised.value)
    assert models.pids() == {}


@pytest.mark.usefixtures("stubs")
async def test_the_router_passes_requests_to_servers_that_someone_else_runs(config: Any) -> None:
    async with RewardModelManager(config(served_model_name="judge")) as theirs:
        served = {"engine": "external", "urls": [f"http://{theirs.reward_router_address}"], "kind": "generative"}
        async with RewardModelManager(RewardModelConfig(models={"judge": served})) as models:
            assert list(models.pids()) == ["router"]
            assert await post(f"http://{models.reward_router_address}", "/echo", b"x") == (200, b"x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_path": "/no/such/model", "log_dir": "/no/such/logs"}, "model_path: the directory '/no/such/"),
        ({"kind": "discriminative"}, r"kind='discriminative'.* is generative"),
        ({"placement": "colocated"}, r"placement='colocated' is only for verl runs, .* set placement='local' or 'ray'"),
    ],
)
async def test_a_wrong_option_is_named_before_anything_starts(
    config: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await RewardModelManager(config(**options)).__aenter__()


def test_the_options_of_the_router_reach_it(config: Any) -> None:
    models = RewardModelManager(config(health_interval_s=0.5, policy="least_in_flight"))
    options = json.loads(dict(pairwise(models._router_command()))["--options"])
    assert (options["health_interval_s"], options["policy"]) == (0.5, "least_in_flight")
    assert options["request_timeout_s"] == 290


def test_the_router_waits_for_the_slowest_model(config: Any) -> None:
    slow = {"model_path": "/judge", "timeout": 600}
    models = RewardModelManager(config(timeout=100, models={"slow": slow}))
    options = json.loads(dict(pairwise(models._router_command()))["--options"])
    assert options["request_timeout_s"] == 580


async def test_a_port_in_use_is_named_with_its_option(config: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"router_port={port}: the port is in use on 127.0.0.1"):
            await RewardModelManager(config(router_port=port)).__aenter__()


@pytest.mark.usefixtures("stubs")
def test_serve_reward_model_gives_an_address(config: Any) -> None:
    with serve_reward_model(config()) as model:
        url = f"http://{model.reward_router_address}"
        assert asyncio.run(post(url, "/echo", b"x")) == (200, b"x")
    with pytest.raises(ConfigError, match="/no/such/model"), serve_reward_model(config(model_path="/no/such/model")):
        pass


# They wait in short steps: Python notices a signal that comes just before a sleep begins only when that is over.
PARENT = """
import asyncio, json, sys, time
from reward_loop.config import RewardModelConfig
from reward_loop.serving import RewardModelManager, models, serve_reward_model

how, model_path, log_dir, *stub = sys.argv[1:]
models.ENGINES["transformers"].command = lambda *_: stub
config = RewardModelConfig(model_path=model_path, log_dir=log_dir, replicas=2)

async def run():
    async with RewardModelManager(config) as models:
        print(json.dumps(list(models.pids().values())), flush=True)
        while True:
            await asyncio.sleep(0.1)

if how == "async":
    asyncio.run(run())
else:
    serving = serve_reward_model(config)
    print(json.dumps(list(serving.__enter__().pids().values())), flush=True)
    if how == "exit":
        sys.exit(0)
    while True:
        time.sleep(0.1)
"""


@pytest.fixture
def parent(config: Any) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(how: str) -> tuple[subprocess.Popen[str], Watched]:
        options = config()
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT, how, options.model_path, options.log_dir, *STUB_COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        started.append(process)
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        assert len(pids) == 3
        return process, Watched(pids)

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("how", "ending"),
    [("async", signal.SIGKILL), ("async", signal.SIGTERM), ("async", signal.SIGINT), ("sync", signal.SIGINT)],
)
def test_no_process_outlives_its_parent(parent: Any, how: str, ending: signal.Signals) -> None:
    process, children = parent(how)
    process.send_signal(ending)
    process.wait(60)
    # After Ctrl-C they were waited for; after a kill they notice by themselves.
    assert children.left_after(0 if ending is signal.SIGINT else 60) == 0


def test_a_program_that_ends_inside_the_block_stops_its_processes(parent: Any) -> None:
    process, children = parent("exit")
    assert process.wait(60) == 0
    assert children.left_after(0) == 0


async def test_weights_that_cannot_be_loaded_are_reported_with_the_log(
    tiny_generative_model: Path, config: Any, tmp_path: Path
) -> None:
    broken = shutil.copytree(tiny_generative_model, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ServerStartError, match=r"server 1/1 exited with status 1 before it was ready") as raised:
        await RewardModelManager(config(model_path=str(broken))).__aenter__()
    assert "afetensor" in str(raised.value)


@contextlib.asynccontextmanager
async def served(
    config: Any, delay_s: float, **options: Any
) -> AsyncIterator[tuple[RewardModelManager, aiohttp.ClientSession]]:
    """Two stub servers behind a router, and a client of it."""
    async with RewardModelManager(config(replicas=2, env={"STUB_DELAY": str(delay_s)}, **options)) as models:
        url = f"http://{models.reward_router_address}"
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
            yield models, session


async def echo(session: aiohttp.ClientSession, text: str) -> str:
    async with session.post("/echo", data=text) as response:
        assert response.status == 200, await response.text()
        return await response.text()


async def all_sent(
    session: aiohttp.ClientSession, send: Callable[[str], Coroutine[Any, Any, Any]] | None = None
) -> list[asyncio.Task[Any]]:
    """A request of each caller, once the servers have got all of them."""
    before = await sent(session)
    requests = [asyncio.create_task(send(text) if send else echo(session, text)) for text in TEXTS]
    async with asyncio.timeout(60):
        while await sent(session) < before + CALLERS:  # noqa: ASYNC110 (another process counts)
            await asyncio.sleep(0.01)
    return requests


async def sent(session: aiohttp.ClientSession) -> int:
    return sum(backend["requests"] for backend in await listed(session))


@pytest.mark.usefixtures("stubs")
async def test_calls_of_the_client_survive_a_killed_router(config: Any) -> None:
    async with served(config, 2.0) as (models, session):

        async def call(text: str) -> Any:
            async with client_post(models.reward_router_address, "/echo", {"caller": text}) as (answer, _):
                return answer

        calls = await all_sent(session, call)
        router = kill(models, "router")
        async with asyncio.timeout(120):
            assert await asyncio.gather(*calls) == [{"caller": text} for text in TEXTS]
        assert models.pids()["router"] != router


@pytest.mark.usefixtures("stubs")
async def test_the_router_is_stopped_before_its_servers_and_does_not_wait_for_requests(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []
    stop = ServerProcess.__aexit__

    async def recorded(process: ServerProcess, *error: object) -> None:
        stopped.append(process.name)
        await stop(process, *error)
        stopped.append(f"{process.name} has ended")

    monkeypatch.setattr(ServerProcess, "__aexit__", recorded)
    monkeypatch.setattr("reward_loop.serving.manager._ROUTER_STOPS_WITHIN_S", 60.0)
    async with asyncio.timeout(120), served(config, 600) as (models, session):
        requests = await all_sent(session)
        await models.stop()
        results = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(result, aiohttp.ClientError) for result in results)
    assert stopped[:2] == ["reward router", "reward router has ended"]
    assert len(stopped) == 6
