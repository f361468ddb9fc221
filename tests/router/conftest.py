from __future__ import annotations

import pytest

from tests import servers


@pytest.fixture(params=["in tasks", "in callbacks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the router serves requests: for those who check that something holds for both ways."""
    monkeypatch.setattr(servers, "IN_TASKS", request.param == "in tasks")
