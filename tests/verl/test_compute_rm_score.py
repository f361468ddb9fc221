"""verl's own `RewardLoopManager` with a manager of this library: samples that failed beside samples that are scored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from tests.managers.rows import data_proto
from tests.support.local_ray import local_ray
from tests.verl.configs import configuration

pytestmark = pytest.mark.integration

FUNCTION = """
def compute_score(solution_str, extra_info):
    if extra_info["fails"]:
        raise ValueError("no score")
    return {"score": len(solution_str) / 10, "acc": True, "pred": solution_str}
"""
WORKERS = 2
ROWS = 4
"""verl gives the first two rows to the first worker, and the others to the second."""


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    with local_ray():
        yield


@pytest.fixture(scope="module", params=["default", "mask", "raise"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def manager(
    policy: str, ray_session: None, tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path
) -> Iterator[Any]:
    from verl.experimental.reward_loop import RewardLoopManager

    function = tmp_path_factory.mktemp(policy) / "reward.py"
    function.write_text(FUNCTION)
    made = RewardLoopManager(
        configuration(
            f"reward.num_workers={WORKERS}",
            "reward.reward_manager.source=importlib",
            "reward.reward_manager.module.path=pkg://reward_loop.managers",
            "reward.reward_manager.name=NaiveRewardLoopManager",
            f"reward.custom_reward_function.path={function}",
            f"actor_rollout_ref.model.path={tiny_generative_model}",
            f"reward_loop.on_failed={policy}",
            "reward_loop.default_score=-0.5",
        )
    )
    yield made
    for worker in made.reward_loop_workers:
        ray.kill(worker)


def batch(failing: tuple[int, ...]) -> Any:
    responses = ["a" * (row + 1) for row in range(ROWS)]
    return data_proto(responses, extra_info=[{"fails": row in failing} for row in range(ROWS)])


@pytest.mark.parametrize("failing", [(0,), (1,), (3,), (0, 1, 2, 3), ()])
def test_failed_samples_do_not_end_the_batch(manager: Any, policy: str, failing: tuple[int, ...]) -> None:
    from verl.trainer.ppo.metric_utils import process_validation_metrics
    from verl.trainer.ppo.reward import extract_reward
    from verl.utils.tensordict_utils import get_tensordict

    data = batch(failing)
    if policy == "raise" and failing:
        with pytest.raises(RayTaskError, match="no score"):
            manager.compute_rm_score(data)
        return
    scored = manager.compute_rm_score(data)
    tensor, columns = extract_reward(scored)
    without = -0.5 if policy == "default" else 0.0
    expected = [without if row in failing else (row + 1) / 10 for row in range(ROWS)]
    assert tensor.sum(dim=1).tolist() == pytest.approx(expected)
    assert list(columns["reward_outcome"]) == ["failed" if row in failing else "scored" for row in range(ROWS)]
    if 0 not in failing:
        assert columns["acc"].tolist() == [None if row in failing else True for row in range(ROWS)]
    # The trainer writes the columns to TransferQueue, or computes validation metrics from them.
    assert get_tensordict(dict(columns)).batch_size[0] == ROWS
    lists = {name: column.tolist() for name, column in columns.items()} | {"reward": tensor.sum(dim=1).tolist()}
    metrics = process_validation_metrics(["source"] * ROWS, ["prompt"] * ROWS, lists)["source"]
    assert metrics["reward"][f"mean@{ROWS}"] == pytest.approx(sum(expected) / ROWS)
    assert all(math.isfinite(value) for values in metrics.values() for value in values.values())
