"""What is in work, what is stuck, and what became of every sample."""

from __future__ import annotations

from reward_loop.records.active import ActiveSample, current, in_work
from reward_loop.records.watchdog import answers, watch
from reward_loop.records.writer import Records, record, records

__all__ = ["ActiveSample", "Records", "answers", "current", "in_work", "record", "records", "watch"]
