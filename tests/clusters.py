"""Ray clusters of several nodes on this machine, whose resources only Ray believes in."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from reward_loop.verl.ray_start import with_ray


@contextmanager
def ray_cluster(*nodes: Mapping[str, Any]) -> Iterator[None]:
    """Starts a node for each mapping of node arguments, the first one as the head, and connects to it.

    `Cluster` would publish its address in a file of the machine, and every ``ray.init()`` of tests that run at the same
    time would join it.
    """
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray._private.utils.write_ray_address", lambda *_: None)
        cluster = with_ray(
            lambda: Cluster(initialize_head=True, head_node_args={**nodes[0], "include_dashboard": False})
        )
        try:
            for node in nodes[1:]:
                with_ray(functools.partial(cluster.add_node, **node))
            ray.init(address=cluster.address, log_to_driver=False)
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()
