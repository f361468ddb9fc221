"""Servers in Ray actors, on one node without GPUs. tests/verl/test_separate_async_run.py has a real engine in one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from reward_loop.config import RewardModelConfig
from reward_loop.errors import ConfigError, ServerStartError
from reward_loop.serving import RewardModelManager
from reward_loop.serving.engines import ENGINES
from tests.support.local_ray import local_ray
from tests.support.servers import STUB_COMMAND, Watched, post

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray(log_to_driver=False):
        yield


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes configurations for stub servers in Ray."""
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    # On the instance: that goes to the actor, the class does not.
    monkeypatch.setattr(ENGINES["transformers"], "command", lambda *_: STUB_COMMAND)

    def make(**options: Any) -> RewardModelConfig:
        return RewardModelConfig(**{"model_path": str(tmp_path), "placement": "ray", "start_timeout_s": 300} | options)

    return make


@pytest.mark.usefixtures("cluster")
async def test_a_server_comes_back_after_its_own_death_and_its_actors(config: Any) -> None:
    from ray.util import placement_group_table

    async with RewardModelManager(config()) as models:
        url = f"http://{models.reward_router_address}"
        assert await post(url, "/echo", b"x") == (200, b"x")
        first = models.pids()["server 1"]
        assert psutil.Process(first).ppid() != os.getpid()
        os.kill(first, signal.SIGKILL)
        assert await post(url, "/echo", b"y") == (200, b"y")
        second = models.pids()["server 1"]
        watched = Watched([second])
        os.kill(psutil.Process(second).ppid(), signal.SIGKILL)
        assert watched.left_after() == 0
        watched.close()
        assert await post(url, "/echo", b"z") == (200, b"z")
        third = models.pids()["server 1"]
        assert len({first, second, third}) == 3
        watched = Watched([models.pids()["server 1"]])
    assert watched.left_after(0) == 0
    watched.close()
    async with asyncio.timeout(60):  # Ray removes groups in the background
        while {group["state"] for group in placement_group_table().values()} != {"REMOVED"}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("env", "timeout_s", "message", "log"),
    [
        ({"STUB_EXIT": "4"}, 300, "exited with status 4 before it was ready", "the stub is told to fail"),
        ({"STUB_DEAF": "1"}, 5, "was not ready after 5 s", "the stub is deaf"),
    ],
)
async def test_a_start_that_fails_shows_the_log_of_the_server(
    config: Any, env: dict[str, str], timeout_s: float, message: str, log: str
) -> None:
    with pytest.raises(ServerStartError, match=rf"on [\d.]+ {message}") as raised:
        await RewardModelManager(config(env=env, start_timeout_s=timeout_s)).__aenter__()
    assert log in str(raised.value)


async def test_without_ray_it_is_refused(config: Any) -> None:
    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(ConfigError, match="Ray is not initialised"):
        await RewardModelManager(config()).__aenter__()
