"""One Ray for the runs of a test process: starting one takes a run some 15 s of CPU time."""

from __future__ import annotations

import atexit
import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path

import pytest

from reward_loop.verl.main_ppo import OBJECT_STORE_BYTES
from tests.clusters import started_cluster

__all__ = ["shared_ray", "stop_shared_ray"]

NODE = {
    "num_cpus": 64,
    "num_gpus": 4,
    "object_store_memory": OBJECT_STORE_BYTES,
    "setup_worker_path": str(Path(__file__).with_name("setup_worker.py")),
}
"""Resources for the largest run; runs take turns."""

_open = contextlib.ExitStack()
atexit.register(_open.close)


@functools.cache
def _started() -> str:
    return _open.enter_context(started_cluster(NODE))


def shared_ray(environment: Mapping[str, str]) -> str:
    """Returns the address of a Ray on this machine. The first call starts it; it stops with this process.

    Args:
        environment: environment variables of Ray's processes and of all workers.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return _started()


def stop_shared_ray() -> None:
    """Stops it, so that the next run gets a new one."""
    _open.close()
    _started.cache_clear()
