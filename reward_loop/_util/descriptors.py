"""The limit of a process on open files (``ulimit -n``)."""

from __future__ import annotations

import contextlib
import resource

__all__ = ["raise_descriptor_limit"]

_ENOUGH = 65_536


def raise_descriptor_limit() -> None:
    """Raise the limit of this process as far as permitted, up to 65,536.

    For servers: each connection is an open file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
