"""Reward workers on two nodes, which are both this machine, and a router that listens on the address of one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from reward_loop.config import RewardModelConfig
from reward_loop.serving import serve_reward_model
from reward_loop.verl.run.job import RunningJob
from reward_loop.verl.run.services import reachable
from reward_loop.verl.workers.reward_workers import RewardWorkers
from tests.support.clusters import ray_cluster
from tests.support.fork_server import worker_python
from tests.verl.configs import resolved as settled
from tests.verl.rollouts import rollout

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.integration

AS_IN_VERL = """
import aiohttp

async def compute_score(solution_str, reward_router_address):
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://{reward_router_address}/v1/models") as response:
            response.raise_for_status()
            return {"score": 1.0, "address": reward_router_address}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    node = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 2**27}
    with ray_cluster(node, node, runtime_env={"py_executable": worker_python()}):
        yield


@pytest.fixture
def model(tmp_path: Path, tiny_generative_model: Path) -> RewardModelConfig:
    return RewardModelConfig(model_path=str(tiny_generative_model), log_dir=str(tmp_path), start_timeout_s=300)


@pytest.mark.usefixtures("cluster")
def test_a_function_written_for_verl_works_on_both_nodes_unchanged(
    model: RewardModelConfig, tmp_path: Path, tiny_generative_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REWARD_LOOP_API_KEY", raising=False)
    (tmp_path / "reward.py").write_text(AS_IN_VERL)
    config = settled(
        f"actor_rollout_ref.model.path={tiny_generative_model}",
        f"custom_reward_function.path={tmp_path}/reward.py",
        "reward.num_workers=2",
        "reward_loop.retry.max_attempts=1",
    )
    model, trusted = reachable(model)
    with serve_reward_model(model, trusted_addresses=trusted) as served:
        router = served.reward_router_address
        assert router.startswith(f"{ray.util.get_node_ip_address()}:")
        job = RunningJob(config.options, 120.0)
        workers = RewardWorkers(config, router, job)
        workers.wait_until_ready()
        rewards = ray.get([worker.compute_score.remote(rollout("x")) for worker in workers.handles])
        infos = [reward["reward_extra_info"] for reward in rewards]
        assert [info["reward_outcome"] for info in infos] == ["scored", "scored"]
        assert {info["address"] for info in infos} == {router}
        for worker in workers.handles:
            ray.kill(worker)
        job.close()


@pytest.mark.usefixtures("cluster")
def test_an_address_that_the_user_has_chosen_is_left_as_it_is(model: RewardModelConfig) -> None:
    chosen, trusted = reachable(model.model_copy(update={"host": "10.0.0.2"}))
    assert (chosen.host, set(trusted)) == ("10.0.0.2", {ray.util.get_node_ip_address()})
