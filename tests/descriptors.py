from __future__ import annotations

import contextlib
import os
from collections import Counter


def open_descriptors() -> Counter[str]:
    """Counts the descriptors of this process by what they lead to, e.g. ``pipe:[31337]``.

    A test subtracts what was open before: descriptors that earlier tests left may close at any time.
    """
    found: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            found[os.readlink(f"/proc/self/fd/{descriptor}")] += 1
    return found
