"""The limit on calls of the function that ask a served reward model at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from reward_loop.errors import ConfigError
from reward_loop.limits.local import REWARD_MODEL
from reward_loop.verl.run.services import with_limits_of_models
from tests.verl.configs import resolved

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
