"""Servers on GPUs that others hold. There are none here: Ray is told so, and deals out numbers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from reward_loop.config import RewardModelConfig
from reward_loop.errors import ConfigError
from reward_loop.serving import RewardModelManager
from reward_loop.serving.engines import ENGINES
from tests.local_ray import local_ray
from tests.servers import STUB_COMMAND, Watched, post

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.integration

NODES = 2
GPUS = 3
"""For each node, as far as Ray knows; both are this one."""


@pytest.fixture(scope="module")
def groups() -> Iterator[list[Any]]:
    """Placement groups as verl's resource pools have them, one a node, and a trainer that holds their GPUs."""
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    with local_ray(log_to_driver=False):

        @ray.remote(num_cpus=1, num_gpus=1 / 3)
        class Trainer:
            def gpus(self) -> list[str]:
                return ray.get_runtime_context().get_accelerator_ids()["GPU"]

        made = [placement_group([{"CPU": 3, "GPU": 1}] * GPUS, strategy="STRICT_PACK") for _ in range(NODES)]
        trainers = [
            Trainer.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote()
            for group in made
            for bundle in range(GPUS)
        ]
        held = ray.get([trainer.gpus.remote() for trainer in trainers])
        for number, group in enumerate(made):
            group.held = [gpu for (gpu,) in held[number * GPUS : (number + 1) * GPUS]]
        yield made


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes configurations for stub servers that take GPUs as vLLM does."""
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    engine = ENGINES["transformers"]
    # On the instance: that goes to the actor, the class does not.
    monkeypatch.setattr(engine, "command", lambda *_: STUB_COMMAND)
    monkeypatch.setattr(engine, "gpus", lambda model: int(model.env["GPUS"]))

    def make(gpus: int, **options: Any) -> RewardModelConfig:
        return RewardModelConfig(
            model_path=str(tmp_path),
            placement="colocated",
            enable_sleep_mode=True,
            start_timeout_s=300,
            log_dir=str(tmp_path / "logs"),
            env={"GPUS": str(gpus)},
            **options,
        )

    return make


def _shared(groups: list[Any]) -> Any:
    from reward_loop.serving.reservation import SharedGpus

    return SharedGpus(groups)


def _visible(pid: int) -> list[str]:
    environment = psutil.Process(pid).environ()
    # On AMD GPUs, the second takes precedence.
    assert environment["HIP_VISIBLE_DEVICES"] == environment["CUDA_VISIBLE_DEVICES"]
    return environment["CUDA_VISIBLE_DEVICES"].split(",")


@pytest.mark.parametrize("gpus", [1, 2])
async def test_servers_see_the_gpus_of_the_trainer(gpus: int, groups: list[Any], config: Any) -> None:
    replicas = NODES * (GPUS // gpus)
    async with RewardModelManager(
        config(gpus, replicas=replicas, starts_at_a_time=replicas), _shared(groups)
    ) as models:
        pids = models.pids()
        seen = [_visible(pids[f"server {number}"]) for number in range(1, replicas + 1)]
    held = [group.held[first : first + gpus] for group in groups for first in range(0, GPUS - gpus + 1, gpus)]
    assert seen == held


async def test_models_share_them_too(groups: list[Any], config: Any) -> None:
    first, second = config(2), config(1)
    both = first.model_copy(update={"models": {"second": second}})
    async with RewardModelManager(both, _shared(groups)) as models:
        pids = models.pids()
        assert _visible(pids["server 1"]) == groups[0].held[:2]
        assert _visible(pids["server 2"]) == groups[0].held[:1]


async def test_more_servers_than_gpus_are_refused(groups: list[Any], config: Any) -> None:
    with pytest.raises(ConfigError, match=r"3 server\(s\) of 2 GPU\(s\), each on one node, do not fit .*\(3, 3 a node"):
        await RewardModelManager(config(2, replicas=3), _shared(groups)).__aenter__()


async def test_a_server_that_dies_asleep_is_restarted_when_the_models_wake(groups: list[Any], config: Any) -> None:
    async with RewardModelManager(config(2), _shared(groups)) as models:
        url = f"http://{models.reward_router_address}"
        before = models.pids()["server 1"]
        await models.sleep()
        watched = Watched([before])
        os.kill(before, signal.SIGKILL)
        assert watched.left_after() == 0
        watched.close()
        waiting = asyncio.create_task(post(url, "/echo", b"x"))
        async with aiohttp.ClientSession(url) as session, asyncio.timeout(120):
            state: dict[str, Any] = {}
            while not state.get("last_error"):
                async with session.get("/workers") as response:
                    (state,) = json.loads(await response.read())
        assert not waiting.done()
        assert "server 1" not in models.pids()
        await models.wake()
        assert await waiting == (200, b"x")
        assert _visible(models.pids()["server 1"]) == groups[0].held[:2]


async def test_outside_a_run_there_is_nothing_to_share(config: Any) -> None:
    with pytest.raises(ConfigError, match="servers share the GPUs of a verl run"):
        await RewardModelManager(config(1)).__aenter__()
