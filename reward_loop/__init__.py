"""Rewards that never block RL training of language models.

The public names are those of ``__init__.pyi``. Each is imported on first use: `import reward_loop` is fast and does not
import torch, Ray, transformers or verl.
"""

from __future__ import annotations

from reward_loop._util.lazy_exports import face

__version__ = "0.3.0"

__all__, __getattr__, __dir__ = face(__name__, __file__)
__all__ = sorted([*__all__, "__version__"])
