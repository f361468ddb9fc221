"""A reward function that draws from the global random generators of Python, NumPy and torch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def draws() -> dict[str, Any]:
    return {"score": 1.0, "drawn": repr([random.random(), np.random.random(), torch.rand(1).item()])}
