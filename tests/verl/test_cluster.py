"""What verl's trainer will take of the cluster."""

from __future__ import annotations

import pytest

from reward_loop.config import RewardModelConfig, ServedModelConfig
from reward_loop.serving.gpus import Accelerator
from reward_loop.verl.cluster import accelerator, for_platform, groups_of_trainer
from reward_loop.verl.services import _fix, _reservation
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


POOL = [
    *("reward_model.enable=True", "reward_model.model.path=/m", "reward_model.rollout.name=transformers"),
    *("custom_reward_function.path=f.py", "trainer.n_gpus_per_node=8"),
    *("reward_model.enable_resource_pool=True", "reward_model.nnodes=1", "reward_model.n_gpus_per_node=4"),
]


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """Sets a platform of verl's without GPUs; returns its accelerator."""
    import verl.plugin.platform as platforms

    class Npu:
        def ray_resource_name(self) -> str:
            return "NPU"

        def visible_devices_envvar(self) -> str:
            return "ASCEND_RT_VISIBLE_DEVICES"

        def rollout_env_vars(self) -> dict[str, str]:
            return {"NCCL_CUMEM_ENABLE": "0", "TASK_QUEUE_ENABLE": "1"}

    monkeypatch.setattr(platforms, "get_platform", Npu)
    return Accelerator("NPU", "ASCEND_RT_VISIBLE_DEVICES")


def test_accelerators_have_the_names_of_verls_platform(npu: Accelerator) -> None:
    assert accelerator() == npu
    assert npu.options(2) == {"num_gpus": 0, "resources": {"NPU": 2}}
    assert npu.environment(["4", "5"]) == {"ASCEND_RT_VISIBLE_DEVICES": "4,5"}
    (trainer,) = groups_of_trainer(settled("trainer.n_gpus_per_node=8"))
    assert trainer.bundle == {"CPU": 3, "NPU": 1}


def test_servers_get_the_variables_that_verls_platform_sets_for_engines(npu: Accelerator) -> None:
    second = ServedModelConfig(model_path="second", env={"TASK_QUEUE_ENABLE": "2"})
    model = for_platform(RewardModelConfig(model_path="judge", env={"A": "B"}, models={"second": second}))
    assert model.env == {"NCCL_CUMEM_ENABLE": "0", "TASK_QUEUE_ENABLE": "1", "A": "B"}
    assert model.models["second"].env == {"NCCL_CUMEM_ENABLE": "0", "TASK_QUEUE_ENABLE": "2"}


def test_a_pool_of_servers_reserves_the_accelerators_of_verls_platform(npu: Accelerator) -> None:
    model = RewardModelConfig(model_path="judge", placement="ray", placement_timeout_s=7)
    reservation = _reservation(settled(), model)
    assert reservation is not None
    assert reservation.accelerator == npu
    assert "Lower reward_model.n_gpus_per_node=4 (with reward_model.nnodes=1)" in _fix(settled(*POOL))
    assert "or trainer.n_gpus_per_node=8 (with trainer.nnodes=1)" in _fix(settled(*POOL))
    assert _reservation(settled(), model.model_copy(update={"placement": "local"})) is None
