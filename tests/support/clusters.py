"""Ray clusters of several nodes on this machine, whose resources only Ray believes in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def ray_cluster(*nodes: Mapping[str, Any], **options: Any) -> Iterator[None]:
    """Starts a cluster, as `started_cluster` does, and connects to it, with options of ``ray.init``."""
    import ray

    with started_cluster(*nodes) as cluster:
        try:
            ray.init(address=cluster.address, log_to_driver=False, **options)
            yield
        finally:
            ray.shutdown()


@contextmanager
def started_cluster(*nodes: Mapping[str, Any]) -> Iterator[Any]:
    """Starts a node for each mapping of node arguments, the first one as the head, and yields the ``Cluster``.

    `Cluster` would publish its address in a file of the machine, and every ``ray.init()`` of tests that run at the same
    time would join it.
    """
    from ray.cluster_utils import Cluster

    head = {**nodes[0], "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray._private.utils.write_ray_address", lambda *_: None)
        cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for node in nodes[1:]:
            cluster.add_node(**node)
        yield cluster
    finally:
        cluster.shutdown()
