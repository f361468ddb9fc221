"""The options, each with its meaning and default. Unknown keys are errors.

Each group is declared in the room that uses it; the names in ``__init__.pyi`` are imported from there on first use.
"""

from __future__ import annotations

from reward_loop._util.lazy_exports import face

__all__, __getattr__, __dir__ = face(__name__, __file__)
