"""Servers in Ray actors, on one node without GPUs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

ray = pytest.importorskip("ray")

from ray.util import placement_group_table  # noqa: E402

from reward_loop.config import RewardModelConfig  # noqa: E402
from reward_loop.errors import ConfigError, ServerStartError  # noqa: E402
from reward_loop.router import RewardModelManager  # noqa: E402
from reward_loop.router.servers.ray_server import GpuReservation  # noqa: E402
from tests.router.serving import Watched  # noqa: E402

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, object_store_memory=2**27, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
async def test_a_server_comes_back_after_its_own_death_and_its_actors(
    tiny_discriminative_model: Path, tmp_path: Path
) -> None:
    config = RewardModelConfig(model_path=str(tiny_discriminative_model), placement="ray", log_dir=str(tmp_path))
    async with RewardModelManager(config) as models:
        async with aiohttp.ClientSession(f"http://{models.reward_router_address}") as session:

            async def logit() -> float:
                async with session.post("/classify", json={"input": "four", "use_activation": False}) as response:
                    assert response.status == 200, await response.text()
                    return (await response.json())["data"][0]["probs"][0]

            expected = await logit()
            server = models.pids()["server 1"]
            actor = psutil.Process(server).ppid()
            assert actor != os.getpid()
            os.kill(server, signal.SIGKILL)
            assert await logit() == pytest.approx(expected, abs=1e-5)
            second = models.pids()["server 1"]
            watched = Watched([second])
            os.kill(psutil.Process(second).ppid(), signal.SIGKILL)
            assert watched.left_after(10) == 0
            watched.close()
            assert await logit() == pytest.approx(expected, abs=1e-5)
            third = models.pids()["server 1"]
            assert len({server, second, third}) == 3
            async with session.get("/workers") as response:
                assert len(await response.json()) == 1
        watched = Watched([third])
    assert watched.left_after(0) == 0
    watched.close()
    assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}


@pytest.mark.usefixtures("cluster")
async def test_a_start_that_fails_shows_the_log_of_the_server(tiny_generative_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((tiny_generative_model / "config.json").read_text())
    with pytest.raises(ServerStartError, match=r"on [\d.]+ exited with status 1 before it was ready") as raised:
        await RewardModelManager(RewardModelConfig(model_path=str(model), placement="ray")).__aenter__()
    assert "Traceback" in str(raised.value)


@pytest.mark.usefixtures("cluster")
def test_more_gpus_than_a_node_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="a server needs 2 GPUs on one node, and the largest node has 0"):
        GpuReservation().reserve(2, 1)


async def test_without_ray_it_is_refused(tiny_generative_model: Path) -> None:
    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(ConfigError, match="Ray is not initialised"):
        await RewardModelManager(RewardModelConfig(model_path=str(tiny_generative_model), placement="ray")).__aenter__()
