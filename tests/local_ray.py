"""Starts Ray for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from reward_loop.verl.ray_start import with_ray


@contextmanager
def local_ray(**options: Any) -> Iterator[None]:
    """Starts a Ray of this machine, and connects to it.

    Args:
        **options: of ``ray.init``.
    """
    import ray

    with_ray(lambda: ray.init("local", include_dashboard=False, **options))
    try:
        yield
    finally:
        ray.shutdown()
