"""Try a reward function before a run."""

from __future__ import annotations

from reward_loop.check.trial import Finding, Report, Row, check

__all__ = ["Finding", "Report", "Row", "check"]
