"""The limit on calls of the function that ask a served reward model at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from reward_loop.limits.permit import MAX_PATIENCE, REWARD_MODEL
from reward_loop.verl.services import with_adaptive_limit
from reward_loop.verl.workers import longest_quiet_s
from tests.verl.configs import resolved

pytestmark = pytest.mark.integration  # imports verl


@pytest.fixture
def served(tiny_generative_model: Path) -> list[str]:
    return [
        "reward_model.enable=True",
        "reward_model.rollout.name=transformers",
        f"reward_model.model.path={tiny_generative_model}",
    ]


def test_the_limit_adapts_to_served_and_external_judges(served: list[str]) -> None:
    external = ["reward_model.rollout.name=external", "+reward_model.server.urls=[http://127.0.0.1:1]"]
    for overrides in (served, ["reward_model.enable=True", "reward_model.model.path=x", *external]):
        limit = with_adaptive_limit(resolved(*overrides)).options.limits[REWARD_MODEL]
        assert (limit.adaptive, limit.max_concurrent, limit.max_wait) == (True, None, None)


def test_what_the_user_has_set_stays(served: list[str]) -> None:
    settings = resolved(*served, "+reward_loop.limits.reward_model.max_concurrent=5")
    limit = with_adaptive_limit(settings).options.limits[REWARD_MODEL]
    assert (limit.adaptive, limit.max_concurrent, limit.max_wait) == (True, 5, None)
    settings = resolved(*served, "+reward_loop.limits.reward_model.adaptive=False")
    assert not with_adaptive_limit(settings).options.limits[REWARD_MODEL].adaptive
    settings = resolved(*served, "reward_loop.job=127.0.0.1:1:x")
    assert with_adaptive_limit(settings) is settings


def test_waiting_for_a_place_is_not_a_stall(served: list[str]) -> None:
    settings = resolved(*served)
    limited = with_adaptive_limit(settings)
    quiet, patient = (longest_quiet_s(options, by_group=False) for options in (settings.options, limited.options))
    assert quiet is not None
    assert patient is not None
    assert settings.options.timeout is not None
    assert patient == quiet + (MAX_PATIENCE - 1) * settings.options.timeout  # a slow judge extends the deadlines
