from __future__ import annotations

import pytest

from reward_loop.router.backend import Backend, BackendState
from reward_loop.router.config import BackendConfig, Kind
from reward_loop.router.http_client import Upstream


def new(**options: object) -> Backend:
    config = BackendConfig.model_validate({"url": "http://a:1", **options})
    return Backend(config, Upstream(config.url), models=config.models)


async def test_requests_and_answers_are_counted() -> None:
    backend = new()
    backend.begin()
    backend.begin()
    backend.end(200, 0.1)
    backend.end(0, 5.0)
    assert (backend.requests, backend.in_flight) == (2, 0)
    assert backend.stats.statuses == {200: 1}
    assert not backend.idle.is_set()


async def test_idle_is_set_when_the_last_request_before_sleep_has_ended() -> None:
    backend = new()
    backend.begin()
    backend.begin()
    backend.state = BackendState.ASLEEP
    backend.end(200, 0.1)
    assert not backend.idle.is_set()
    backend.end(0, 0.1)
    assert backend.idle.is_set()


@pytest.mark.parametrize(
    ("models", "own", "model", "kind", "can"),
    [
        ((), None, "m", "generative", True),
        (("m",), None, "m", None, True),
        (("m",), None, "n", None, False),
        (("m",), "generative", None, "discriminative", False),
        (("m",), "generative", "m", "generative", True),
    ],
)
async def test_requests_that_a_backend_can_answer(
    models: tuple[str, ...], own: Kind | None, model: str | None, kind: Kind | None, can: bool
) -> None:
    assert new(models=models, kind=own).can_answer(model, kind) is can
