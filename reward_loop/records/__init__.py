"""The active samples, the watchdog that logs slow ones, and a record of every sample."""

from __future__ import annotations

from reward_loop.records.active import ActiveBatch, ActiveSample, active_samples, current, waiting_for
from reward_loop.records.watchdog import answers, watch
from reward_loop.records.writer import Records, record, records

__all__ = [
    "ActiveBatch",
    "ActiveSample",
    "Records",
    "active_samples",
    "answers",
    "current",
    "record",
    "records",
    "waiting_for",
    "watch",
]
