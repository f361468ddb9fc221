"""Raises the limit on open files of a process (``ulimit -n``)."""

from __future__ import annotations

import contextlib
import resource

__all__ = ["raise_descriptor_limit"]

_ENOUGH = 65_536


def raise_descriptor_limit() -> None:
    """Raises this process's limit on open files to 65,536, or to the hard limit if that is lower.

    Servers and reward workers call it because each connection is an open file. It never lowers the limit, and raises no
    error if the limit cannot be changed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
