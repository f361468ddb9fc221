from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


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
