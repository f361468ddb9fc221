"""The requests and replies of other trainers, one module each.

A module has a function ``routes`` that returns the routes of its trainer. Its class of bodies has the fields that the
trainer's client sends; unknown fields are ignored, since a newer version of the trainer may send more.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter

from reward_loop.adapters.service.dialects import llamafactory, nemo_gym, openrlhf, slime
from reward_loop.adapters.service.dialects.options import DialectOptions
from reward_loop.adapters.service.service import RewardService

__all__ = ["DIALECTS", "DialectOptions"]

DIALECTS: dict[str, Callable[[RewardService, DialectOptions], APIRouter]] = {
    "openrlhf": openrlhf.routes,
    "slime": slime.routes,
    "llamafactory": llamafactory.routes,
    "nemo-gym": nemo_gym.routes,
}
"""The routes of each trainer, by the name of its dialect."""
