"""The active samples, the watchdog that logs slow ones, and the records of samples."""

from __future__ import annotations

from reward_loop._util.lazy_exports import face

__all__, __getattr__, __dir__ = face(__name__, __file__)
