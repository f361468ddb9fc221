"""What is in work, what is stuck, and what became of every sample."""

from __future__ import annotations

from reward_loop.records.active import Call, current, in_work, waiting_for
from reward_loop.records.watchdog import answers, watch
from reward_loop.records.writer import Records, record, records

__all__ = ["Call", "Records", "answers", "current", "in_work", "record", "records", "waiting_for", "watch"]
