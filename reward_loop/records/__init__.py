"""The active samples, the watchdog that logs slow ones, and the records of samples."""

from __future__ import annotations

from reward_loop.records.active import OUTAGE, ActiveBatch, ActiveSample, active_samples, current, waiting_for
from reward_loop.records.rows import (
    TEXT_FIELDS,
    exchanges_of,
    large_components,
    reward_change_row,
    sample_row,
    text_row,
)
from reward_loop.records.watchdog import answers, watch
from reward_loop.records.writer import Records, cleaned, encode_record, hide, records

__all__ = [
    "OUTAGE",
    "TEXT_FIELDS",
    "ActiveBatch",
    "ActiveSample",
    "Records",
    "active_samples",
    "answers",
    "cleaned",
    "current",
    "encode_record",
    "exchanges_of",
    "hide",
    "large_components",
    "records",
    "reward_change_row",
    "sample_row",
    "text_row",
    "waiting_for",
    "watch",
]
