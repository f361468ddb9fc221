"""Servers on two nodes of 8 GPUs each, which only Ray believes in; both are this machine.

Ray is forbidden to set CUDA_VISIBLE_DEVICES, as some clusters do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from reward_loop.config import RewardModelConfig
from reward_loop.errors import ConfigError, ServerStartError
from reward_loop.serving import RewardModelManager
from reward_loop.serving.engines import ENGINES
from tests.support.clusters import ray_cluster
from tests.support.servers import STUB_COMMAND, post

ray = pytest.importorskip("ray")

from reward_loop.serving.ray_server import GpuPlace, GpuReservation  # noqa: E402

pytestmark = pytest.mark.integration

GPUS = 8
"""Of each node."""

ONE = {"CPU": 1.0, "GPU": 1.0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    common = {"num_cpus": 2 * GPUS, "num_gpus": GPUS, "object_store_memory": 2**27}
    nodes = [{**common, "resources": {name: 1}} for name in ("first", "second")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
        with ray_cluster(*nodes):
            yield


@pytest.fixture
def reserve(cluster: None) -> Iterator[Any]:
    """Reserves as others would, and says in time whether there is room."""
    from ray.util.placement_group import placement_group, remove_placement_group

    until_free(2 * GPUS)  # Ray frees the bundles of earlier tests some time after their groups were removed.
    made: list[Any] = []

    def make(count: int, **more: float) -> bool:
        made.append(placement_group([{**ONE, **more}] + [ONE] * (count - 1), strategy="STRICT_PACK"))
        return made[-1].wait(120)

    yield make
    for group in made:
        remove_placement_group(group)


def until_free(gpus: int) -> None:
    """Waits until that many GPUs of the cluster are free."""
    deadline = time.monotonic() + 60
    while ray.available_resources().get("GPU", 0) < gpus:
        assert time.monotonic() < deadline, "groups of earlier tests still hold GPUs"
        time.sleep(0.05)


@asynccontextmanager
async def reserved(servers: int, gpus: int, **options: Any) -> AsyncIterator[list[GpuPlace]]:
    """Reserve the places of servers."""
    reservation = GpuReservation(timeout_s=60, **options)
    try:
        yield await reservation.places([(gpus, 1)] * servers)
    finally:
        reservation.release()


@pytest.mark.parametrize(
    ("servers", "size", "groups", "bundles"),
    [
        (4, 2, 1, 8),  # the servers leave a whole node
        (8, 1, 1, 8),
        (1, 8, 2, 4),  # the trainer leaves one
        (2, 4, 2, 4),
        (2, 2, 2, 6),
    ],
)
async def test_servers_leave_room_for_the_trainer(
    servers: int, size: int, groups: int, bundles: int, reserve: Any
) -> None:
    async with reserved(servers, size, others=[bundles] * groups) as places:
        assert len(places) == servers
        for _ in range(groups):
            assert await asyncio.to_thread(reserve, bundles)


@pytest.mark.usefixtures("cluster")
async def test_nodes_that_the_trainer_needs_are_not_split() -> None:
    with pytest.raises(ConfigError, match=r"no room for the reward model servers beside the trainer"):
        await GpuReservation([6, 6], timeout_s=60).places([(4, 1)])


async def test_missing_room_is_an_error_in_time_with_the_resources_of_each_node(reserve: Any) -> None:
    assert await asyncio.to_thread(reserve, 8)
    with pytest.raises(
        ServerStartError,
        match=r"free resources .* within 2 s \(placement_timeout_s\): .*'GPU': 2.0.* nodes have .*'GPU': 8.0",
    ):
        await GpuReservation(timeout_s=2).places([(2, 1)] * 5)
    # What was reserved is free again.
    assert await asyncio.to_thread(reserve, 8)


@pytest.mark.usefixtures("cluster")
async def test_servers_without_gpus_are_spread_over_the_nodes() -> None:
    from ray.util import placement_group_table

    async with reserved(2, 0) as (first, second):
        nodes = placement_group_table(first.group)["bundles_to_node_id"]
        assert nodes[first.bundle] != nodes[second.bundle]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RewardModelConfig:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    engine = ENGINES["transformers"]
    # On the instance: that goes to the actor, the class does not.
    monkeypatch.setattr(engine, "command", lambda *_: STUB_COMMAND)
    monkeypatch.setattr(engine, "gpus", lambda _: 2)
    return RewardModelConfig(
        model_path=str(tmp_path), placement="ray", replicas=4, starts_at_a_time=4, start_timeout_s=300
    )


def _this_node() -> str:
    """The resource that only this process's node has."""
    here = ray.get_runtime_context().get_node_id()
    (resources,) = (node["Resources"] for node in ray.nodes() if node["NodeID"] == here)
    return "first" if "first" in resources else "second"


async def test_servers_on_another_node_listen_on_its_address_and_ask_for_the_key_of_the_router(
    reserve: Any, config: Any
) -> None:
    assert await asyncio.to_thread(reserve, 8, **{_this_node(): 1.0})
    async with RewardModelManager(config) as models:
        url = f"http://{models.reward_router_address}"
        for number in range(8):
            assert await post(url, "/echo", b"%d" % number) == (200, b"%d" % number)
        servers = [psutil.Process(pid) for role, pid in models.pids().items() if role != "router"]
        assert len(servers) == 4
        for server in servers:
            (address,) = (c.laddr for c in server.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
            assert address.ip == ray.util.get_node_ip_address()
            assert (await post(f"http://{address.ip}:{address.port}", "/echo", b"x"))[0] == 401
        # Ray did not set the variable: each server sees the GPUs that it holds.
        seen = [server.environ()["CUDA_VISIBLE_DEVICES"].split(",") for server in servers]
        assert sorted(gpu for gpus in seen for gpu in gpus) == [str(number) for number in range(8)]
