"""How the ranks of a CPU run find each other."""

from __future__ import annotations

import types
from pathlib import Path

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

    from examples.verl_cpu.plugin import _meeting_place

    node = types.SimpleNamespace(get_session_dir_path=lambda: "/tmp/ray/session")
    worker_group.setattr(ray._private.worker, "_global_node", node)
    assert _meeting_place() == "file:///tmp/ray/session/reward-loop-abc-1234"


def test_ranks_on_several_nodes_meet_at_the_address_that_verl_chose(worker_group: pytest.MonkeyPatch) -> None:
    from examples.verl_cpu.plugin import _meeting_place

    worker_group.setenv("RAY_LOCAL_WORLD_SIZE", "2")
    assert _meeting_place() == "env://"


def test_the_weights_of_the_old_policy_do_not_change_with_the_new_one(tmp_path: Path) -> None:
    import torch
    import verl.utils.fsdp_utils
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import examples.verl_cpu.engine  # noqa: F401  replaces verl's function

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        saved, _ = verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu(model)
        with torch.no_grad():
            model.weight.add_(1)
        assert torch.equal(saved["weight"][0] + 1, model.weight.to_local())
    finally:
        torch.distributed.destroy_process_group()
