"""What is in work, what is stuck, and what became of every sample."""

from __future__ import annotations

from reward_loop.watch.calls import Call, current, in_work
from reward_loop.watch.records import Records, record, records
from reward_loop.watch.watchdog import answers, watch

__all__ = ["Call", "Records", "answers", "current", "in_work", "record", "records", "watch"]
