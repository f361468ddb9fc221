"""Processes in which sync functions run and can be killed."""

from __future__ import annotations

from reward_loop._util.lazy_exports import face

__all__, __getattr__, __dir__ = face(__name__, __file__)
