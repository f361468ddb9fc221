from __future__ import annotations

from collections.abc import Iterator

import pytest

from reward_loop.adapters.process_agent import close_agent


@pytest.fixture(autouse=True)
def closed_agent() -> Iterator[None]:
    yield
    close_agent()
