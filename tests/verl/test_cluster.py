"""What verl's trainer will take of the cluster."""

from __future__ import annotations

import pytest

from reward_loop.verl.cluster import accelerator, groups_of_trainer
from tests.verl.configs import settled


def _sizes(*overrides: str) -> list[tuple[int, int, float]]:
    groups = groups_of_trainer(settled("trainer.n_gpus_per_node=8", "trainer.nnodes=2", *overrides))
    return [(group.groups, group.bundles, group.bundle["CPU"]) for group in groups]


@pytest.mark.integration
def test_the_trainer_takes_whole_nodes() -> None:
    assert _sizes() == [(2, 8, 3)]


def test_rollouts_in_another_place_and_a_teacher_take_gpus_as_well() -> None:
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        "trainer.v1.trainer_mode=separate_async",
        f"{rollout}.nnodes=2",
        f"{rollout}.n_gpus_per_node=4",
        f"{rollout}.tensor_model_parallel_size=2",
    ]
    assert _sizes(*overrides) == [(2, 8, 3), (4, 2, 2)]
    # One replica on two nodes.
    assert _sizes(*overrides, f"{rollout}.tensor_model_parallel_size=8") == [(2, 8, 3), (2, 4, 2)]
    teacher = ["distillation.enabled=True", "distillation.nnodes=1", "distillation.n_gpus_per_node=4"]
    assert _sizes(*teacher) == [(2, 8, 3), (1, 4, 3)]


def test_accelerators_have_the_names_of_verls_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    import verl.plugin.platform as platforms

    class Npu:
        def ray_resource_name(self) -> str:
            return "NPU"

        def visible_devices_envvar(self) -> str:
            return "ASCEND_RT_VISIBLE_DEVICES"

    monkeypatch.setattr(platforms, "get_platform", Npu)
    npu = accelerator()
    assert npu.options(2) == {"num_gpus": 0, "resources": {"NPU": 2}}
    assert npu.environment(["4", "5"]) == {"ASCEND_RT_VISIBLE_DEVICES": "4,5"}
