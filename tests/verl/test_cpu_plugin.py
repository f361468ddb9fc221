"""How the ranks of a CPU run find each other."""

from __future__ import annotations

import types

import pytest

pytestmark = pytest.mark.integration  # imports verl


@pytest.fixture
def worker_group(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a training worker: verl sets these variables."""
    for name, value in {
        "WG_PREFIX": "abc",
        "MASTER_PORT": "1234",
        "WORLD_SIZE": "4",
        "RAY_LOCAL_WORLD_SIZE": "4",
    }.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_ranks_on_one_node_meet_in_a_file_of_rays_session(worker_group: pytest.MonkeyPatch) -> None:
    import ray

    from reward_loop.verl.cpu.plugin import _meeting_place

    node = types.SimpleNamespace(get_session_dir_path=lambda: "/tmp/ray/session")
    worker_group.setattr(ray._private.worker, "_global_node", node)
    assert _meeting_place() == "file:///tmp/ray/session/reward-loop-abc-1234"


def test_ranks_on_several_nodes_meet_at_the_address_that_verl_chose(worker_group: pytest.MonkeyPatch) -> None:
    from reward_loop.verl.cpu.plugin import _meeting_place

    worker_group.setenv("RAY_LOCAL_WORLD_SIZE", "2")
    assert _meeting_place() == "env://"
