"""What verl's trainer will take of the cluster."""

from __future__ import annotations

import pytest

from reward_loop.config import RewardModelConfig
from reward_loop.verl.run import services
from reward_loop.verl.run.services import _reservation, groups_of_trainer, reachable
from tests.verl.configs import settled

pytestmark = pytest.mark.integration  # imports verl


def groups(*overrides: str) -> list[int]:
    return groups_of_trainer(settled("trainer.n_gpus_per_node=8", "trainer.nnodes=2", *overrides))


def test_the_trainer_takes_whole_nodes() -> None:
    assert groups() == [8, 8]


def test_rollouts_in_another_place_and_a_teacher_take_gpus_as_well() -> None:
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        "trainer.v1.trainer_mode=separate_async",
        f"{rollout}.nnodes=2",
        f"{rollout}.n_gpus_per_node=4",
        f"{rollout}.tensor_model_parallel_size=2",
    ]
    assert groups(*overrides) == [8, 8, 2, 2, 2, 2]
    # One replica on two nodes.
    assert groups(*overrides, f"{rollout}.tensor_model_parallel_size=8") == [8, 8, 4, 4]
    teacher = ["distillation.enabled=True", "distillation.nnodes=1", "distillation.n_gpus_per_node=4"]
    assert groups(*teacher) == [8, 8, 4]


def test_servers_in_ray_leave_room_for_the_trainer() -> None:
    model = RewardModelConfig(model_path="judge", placement="ray", placement_timeout_s=7)
    reservation = _reservation(settled("trainer.n_gpus_per_node=8"), model)
    assert reservation is not None
    assert (list(reservation.others), reservation.timeout_s) == ([8], 7)
    assert _reservation(settled(), model.model_copy(update={"placement": "local"})) is None


def test_a_router_for_several_nodes_listens_on_this_nodes_address_or_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeManagerAddress": address} for address in ("10.0.0.1", "10.0.0.2")]
    monkeypatch.setattr(services, "_alive", lambda: nodes)
    monkeypatch.setattr(services.ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    model = RewardModelConfig(model_path="judge")
    for given, host in ((model, "10.0.0.1"), (model.model_copy(update={"host": "10.0.0.9"}), "10.0.0.9")):
        found, trusted = reachable(given)
        assert (found.host, trusted) == (host, ["10.0.0.1", "10.0.0.2"])
