"""Audits of a judge during a run: probes of answers whose score should be known, labelled answers, a second judge."""

from __future__ import annotations

from reward_loop.audit.ablation import AblationCount, Feature
from reward_loop.audit.audit import Audit, open_audit
from reward_loop.audit.counts import AuditCounts, ProbeCount, ReferencePair

__all__ = ["AblationCount", "Audit", "AuditCounts", "Feature", "ProbeCount", "ReferencePair", "open_audit"]
