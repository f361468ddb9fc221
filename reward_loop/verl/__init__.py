"""The integration with verl.

This module must not import verl: verl chooses its platform at import, so it is imported late.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("verl") is None:
    raise ImportError("verl is not installed; from a clone of reward_loop: pip install '.[verl]'", name=__name__)
