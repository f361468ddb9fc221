"""Settings of Python's garbage collector, for processes that the library starts. All others belong to the user."""

from __future__ import annotations

import gc

__all__ = ["THRESHOLD", "freeze_and_raise_threshold", "raise_threshold"]

THRESHOLD = 200_000
"""The number of new objects that triggers a garbage collection. A sample in flight has about 30 objects, so Python's
default of 700 would trigger a collection every 24 samples, although samples in flight are not garbage."""


def raise_threshold() -> None:
    """Collect less often; see `THRESHOLD`."""
    gc.set_threshold(THRESHOLD)


def freeze_and_raise_threshold() -> None:
    """Collect less often, and exclude the objects that exist now, such as imported modules.

    torch and verl create more than a million objects, which a full collection would scan for half a second.
    """
    gc.collect()
    gc.freeze()
    raise_threshold()
