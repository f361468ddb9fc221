from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gsm8k import ROOT


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray whose workers find the modules of the tests."""
    from tests.support.local_ray import local_ray

    with local_ray(runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0"}}):
        yield


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TransferQueue as a dict, for all that reads and writes it by `tq_rows`."""
    from reward_loop.verl import tq_rows
    from tests.verl.fake_queue import FakeQueue

    queue = FakeQueue()
    monkeypatch.setattr(tq_rows, "tq", queue)
    return queue


@pytest.fixture
def with_function(tiny_generative_model: Path, tmp_path: Path) -> Callable[..., Any]:
    """Return the settings of a run: ``with_function(source, *overrides, **reward_kwargs)``.

    The source is that of the file with the reward function; without one, verl's functions are used.
    """
    from tests.verl.configs import resolved

    def settings(source: str | None, *overrides: str, **reward_kwargs: Any) -> Any:
        given = [f"actor_rollout_ref.model.path={tiny_generative_model}", *overrides]
        if source is not None:
            file = tmp_path / "reward.py"
            file.write_text(source)
            given.append(f"custom_reward_function.path={file}")
        given += [f"+custom_reward_function.reward_kwargs.{name}={value}" for name, value in reward_kwargs.items()]
        return resolved(*given)

    return settings
