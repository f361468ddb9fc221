"""Servers on two nodes of 8 GPUs each, which only Ray believes in; both are this machine.

Ray is forbidden to set CUDA_VISIBLE_DEVICES, as some clusters do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from reward_loop.config import RewardModelConfig
from reward_loop.errors import ConfigError, ServerStartError
from reward_loop.serving import RewardModelManager
from reward_loop.serving.engines import ENGINES
from tests.clusters import ray_cluster
from tests.servers import STUB_COMMAND, post

ray = pytest.importorskip("ray")

from reward_loop.serving.gpus import NPU  # noqa: E402
from reward_loop.serving.reservation import Demand, GpuPlace, GpuReservation, Others  # noqa: E402

pytestmark = pytest.mark.integration

GPUS = 8
"""Of each node."""

ONE = {"CPU": 1.0, "GPU": 1.0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    common = {"num_cpus": 2 * GPUS, "num_gpus": GPUS, "object_store_memory": 2**27}
    nodes = [{**common, "resources": {name: 1, "NPU": GPUS}} for name in ("first", "second")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
        with ray_cluster(*nodes):
            yield


@pytest.fixture
def reserve(cluster: None) -> Iterator[Any]:
    """Reserves as others would, and says in time whether there is room."""
    from ray.util.placement_group import placement_group, remove_placement_group

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
async def reserved(demand: Demand, **options: Any) -> AsyncIterator[list[GpuPlace]]:
    """Reserve the places of the servers of one model."""
    reservation = GpuReservation(timeout_s=60, **options)
    try:
        (places,) = await reservation.places([demand])
        yield places
    finally:
        reservation.release()


def _others(groups: int, bundles: int) -> Others:
    return Others("group(s) of the trainer", groups, bundles, ONE)


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
    async with reserved(Demand(servers, size, 1), others=[_others(groups, bundles)]) as places:
        assert len(places) == servers
        for _ in range(groups):
            assert await asyncio.to_thread(reserve, bundles)


@pytest.mark.usefixtures("cluster")
async def test_more_than_the_cluster_has_is_refused_at_once_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError) as caught:
        await GpuReservation([_others(1, 8)]).places([Demand(5, 2, 1)])
    for part in (
        "too few GPUs",
        "18 are needed",
        "5 reward model server(s) of 2 GPU(s) and 1 CPU(s)",
        "1 group(s) of the trainer of 8 GPU(s) and 8 CPU(s)",
        "of 8 GPU(s) free",
    ):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match=r"9 of them on one node, and there are 16, 8 on the largest node"):
        await GpuReservation().places([Demand(1, 9, 1)])
    with pytest.raises(ConfigError, match=r"too few CPUs .*\. The servers' engine runs on the CPU\."):
        await GpuReservation().places([Demand(1, 0, 17)])
    with pytest.raises(ConfigError, match=r"too few NPUs .*: 18 are needed.*\. Lower trainer\.n_gpus_per_node$"):
        await GpuReservation(accelerator=NPU, fix="Lower trainer.n_gpus_per_node").places([Demand(9, 2, 1)])
    with pytest.raises(ConfigError, match=r"too few TPUs .*\. Ray found no TPU on any node"):
        await GpuReservation(accelerator=replace(NPU, resource="TPU")).places([Demand(1, 1, 1)])


@pytest.mark.usefixtures("cluster")
async def test_accelerators_of_another_platform_are_reserved_by_their_name_in_ray() -> None:
    async with reserved(Demand(2, 8, 1), accelerator=NPU) as (place, _):
        assert place.accelerator == NPU
        assert (place.resources["num_gpus"], place.resources["resources"]) == (0, {"NPU": 8})


async def test_missing_room_is_an_error_in_time_with_the_resources_of_each_node(reserve: Any) -> None:
    assert await asyncio.to_thread(reserve, 8)
    # Ray frees the bundles of earlier tests some time after their groups were removed.
    await asyncio.to_thread(until_free, 8)
    reservation = GpuReservation([_others(1, 8)], timeout_s=2)
    with pytest.raises(ServerStartError, match=r"free resources .* within 2 s \(placement_timeout_s\)") as caught:
        await reservation.places([Demand(4, 2, 1)])
    assert "0 of 8 GPU(s)" in str(caught.value)
    assert "8 of 8 GPU(s) free" in str(caught.value)
    # What was held for the trainer is free again.
    assert await asyncio.to_thread(reserve, 8)


@pytest.mark.usefixtures("cluster")
async def test_servers_without_gpus_are_spread_over_the_nodes() -> None:
    from ray.util import placement_group_table

    async with reserved(Demand(2, 0, 1)) as (first, second):
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


def _exits() -> list[tuple[str, int]]:
    """The addresses at which tunnels are open to other machines."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if "reward_loop.serving.tunnels exit" in " ".join(process.cmdline()):
                found += [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return found


def _this_node() -> str:
    """The resource that only this process's node has."""
    here = ray.get_runtime_context().get_node_id()
    (resources,) = (node["Resources"] for node in ray.nodes() if node["NodeID"] == here)
    return "first" if "first" in resources else "second"


async def test_servers_on_another_node_are_reached_through_tunnels_alone(reserve: Any, config: Any) -> None:
    assert await asyncio.to_thread(reserve, 8, **{_this_node(): 1.0})
    async with RewardModelManager(config) as models:
        url = f"http://{models.reward_router_address}"
        for number in range(8):
            assert await post(url, "/echo", b"%d" % number) == (200, b"%d" % number)
        servers = [psutil.Process(pid) for role, pid in models.pids().items() if role != "router"]
        assert len(servers) == 4
        for server in servers:
            listening = [c.laddr.ip for c in server.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            assert listening == ["127.0.0.1"]
        # Ray did not set the variable: each server sees the GPUs that it holds.
        seen = [server.environ()["CUDA_VISIBLE_DEVICES"].split(",") for server in servers]
        assert sorted(gpu for gpus in seen for gpu in gpus) == [str(number) for number in range(8)]
        exits = await asyncio.to_thread(_exits)
        assert len(exits) == 4
        for host, port in exits:
            assert (await post(f"http://{host}:{port}", "/echo", b"x"))[0] == 401
    assert await asyncio.to_thread(_exits) == []
