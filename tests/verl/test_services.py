"""What the services of a run leave to verl's trainer, and the limits on calls that ask served reward models."""

from __future__ import annotations

from pathlib import Path

import pytest

from reward_loop.config import RewardModelConfig
from reward_loop.errors import ConfigError
from reward_loop.limits.local import REWARD_MODEL
from reward_loop.verl.run import services
from reward_loop.verl.run.services import _reservation, groups_of_trainer, reachable, with_limits_of_models
from tests.verl.configs import resolved, settled

pytestmark = pytest.mark.integration  # imports verl


@pytest.fixture
def served(tiny_generative_model: Path) -> list[str]:
    return [
        "reward_model.enable=True",
        "reward_model.rollout.name=transformers",
        f"reward_model.model.path={tiny_generative_model}",
    ]


def test_served_and_external_judges_have_places_for_each_replica(served: list[str]) -> None:
    external = ["reward_model.rollout.name=external", "+reward_model.server.urls=[http://127.0.0.1:1]"]
    small = [*served, "+reward_model.server.max_batch_size=8", "+reward_model.server.replicas=2"]
    external = ["reward_model.enable=True", "reward_model.model.path=x", *external]
    for overrides, places in ((served, 64), (external, 64), (small, 16)):
        limit = with_limits_of_models(resolved(*overrides)).options.limits[REWARD_MODEL]
        assert (limit.adaptive, limit.max_concurrent, limit.max_wait) == (False, places, None)


def test_what_the_user_has_set_stays(served: list[str]) -> None:
    settings = resolved(*served, "+reward_loop.limits.reward_model.max_concurrent=5")
    limit = with_limits_of_models(settings).options.limits[REWARD_MODEL]
    assert (limit.adaptive, limit.max_concurrent, limit.max_wait) == (False, 5, None)


def test_each_model_has_its_own_limit_and_deadline(served: list[str], tiny_discriminative_model: Path) -> None:
    strong = "+reward_model.server.models.strong"
    served += ["+reward_model.server.served_model_name=fast", f"{strong}.model_path={tiny_discriminative_model}"]
    settings = resolved(
        *served, "+reward_model.server.timeout=20", f"{strong}.max_concurrent=3", f"{strong}.timeout=60"
    )
    models = with_limits_of_models(settings).options.models
    assert {name: (model.max_concurrent, model.timeout) for name, model in models.items()} == {
        "fast": (None, 20),
        "strong": (3, 60),
    }
    with pytest.raises(
        ConfigError, match=r"models\.strong\.max_concurent: unknown option; did you mean 'max_concurrent'"
    ):
        resolved(*served, f"{strong}.max_concurent=3")


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
