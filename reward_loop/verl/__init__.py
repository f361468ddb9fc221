"""All that imports verl. It is imported late, and not here: its platform is chosen while it is imported."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("verl") is None:
    raise ImportError("verl is not installed; from a clone of reward_loop: pip install '.[verl]'", name=__name__)
