"""Starts Ray again if a busy machine made its start time out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from reward_loop._util.process import descendants, kill

__all__ = ["STARTS", "START_TIMED_OUT", "with_ray"]

STARTS = 4
"""The largest number of attempts to start Ray."""

START_TIMED_OUT = "The current node timed out during startup"
"""Ray's error if its node is not ready after 30 s. The usual cause on a busy machine is that an agent of the node takes
more than 15 s to start: the node ends then. No option changes this limit (https://github.com/ray-project/ray/issues/65983)."""

T = TypeVar("T")


def with_ray(function: Callable[[], T]) -> T:
    """Calls a function that starts Ray first, and calls it again if the start timed out: at most `STARTS` calls.

    Ray leaves the other processes of such a node alive: a dashboard, a log monitor, an autoscaler. They are killed.

    Raises:
        Exception: any other error of the function, or the one of its last call.
    """
    import ray

    for start in range(1, STARTS):
        before = descendants(os.getpid())
        try:
            return function()
        except Exception as error:
            if ray.is_initialized() or START_TIMED_OUT not in str(error):
                raise
            for pid in set(descendants(os.getpid())).difference(before):
                kill(pid)
            print(f"Ray did not start in time: the machine is busy. Starting it again ({start + 1} of {STARTS}).")
    return function()
