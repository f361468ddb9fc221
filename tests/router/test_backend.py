from __future__ import annotations

import pytest

from reward_loop.router.backend import Worker, WorkerState
from reward_loop.router.config import Kind, WorkerConfig
from reward_loop.router.http_client import Upstream


def new(**options: object) -> Worker:
    config = WorkerConfig.model_validate({"url": "http://a:1", **options})
    return Worker(config, Upstream(config.url), models=config.models)


async def test_it_counts_what_it_was_given_and_what_it_answered() -> None:
    worker = new()
    worker.begin()
    worker.begin()
    worker.end(200, 0.1)
    worker.end(0, 5.0)
    assert (worker.requests, worker.in_flight) == (2, 0)
    assert worker.stats.statuses == {200: 1}
    assert not worker.idle.is_set()


async def test_one_that_is_to_sleep_says_when_its_last_request_is_done() -> None:
    worker = new()
    worker.begin()
    worker.begin()
    worker.state = WorkerState.ASLEEP
    worker.end(200, 0.1)
    assert not worker.idle.is_set()
    worker.end(0, 0.1)
    assert worker.idle.is_set()


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
async def test_what_it_can_answer(
    models: tuple[str, ...], own: Kind | None, model: str | None, kind: Kind | None, can: bool
) -> None:
    assert new(models=models, kind=own).can_answer(model, kind) is can
