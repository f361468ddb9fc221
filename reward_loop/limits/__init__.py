"""Limits, budget and failure bound that all workers of a job share."""

from __future__ import annotations

from reward_loop._util.lazy_exports import face

__all__, __getattr__, __dir__ = face(__name__, __file__)
