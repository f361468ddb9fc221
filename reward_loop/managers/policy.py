"""The policies for unscored and failed samples, and the record of a sample with what they made of it."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

from reward_loop.errors import BudgetSpentError
from reward_loop.managers.options import RewardLoopConfig
from reward_loop.records import (
    ActiveSample,
    Records,
    exchanges_of,
    large_components,
    records,
    reward_change_row,
    sample_row,
    text_row,
)
from reward_loop.types import Outcome, RewardResult, RewardSample

__all__ = ["decide", "open_records", "record_reward_change", "record_sample"]


def decide(result: RewardResult, options: RewardLoopConfig, total_s: float = 0.0) -> RewardResult:
    """Return a result with what the policies make of it: its ``reward``, whether it is ``masked``, and the ``policy``.

    Nothing else applies the policies. ``total_s`` is that of the result.
    """
    if result.score is not None:
        return replace(result, reward=result.score, total_s=total_s)
    policy = result.policy or (options.on_failed if result.outcome is Outcome.FAILED else options.on_unscored)
    if isinstance(result.exception, BudgetSpentError):
        policy = options.budget.at_cap
    reward = options.default_score if policy == "default" else None
    return replace(result, policy=policy, reward=reward, masked=policy == "mask", total_s=total_s)


def open_records(options: RewardLoopConfig) -> Records | None:
    """Return this process's writer for ``log_dir``; ``None`` if the folder does not exist."""
    return records(options.log_dir, options.record.max_bytes) if options.log_dir else None


def record_sample(writer: Records, active: ActiveSample, result: RewardResult, options: RewardLoopConfig) -> None:
    """Record a sample that has been scored; the result has its reward."""
    full = options.record.full
    is_full = full >= 1 or result.outcome is not Outcome.SCORED or _fraction(active.sample) < full
    large = large_components(result.extra_info)
    text = text_row(active.sample, large) if is_full else None
    row = sample_row(active, result, large)
    writer.write(row, text, exchanges_of(active) if active.exchanges else ())


def record_reward_change(options: RewardLoopConfig, sample: RewardSample, function: str, **changes: Any) -> None:
    """Record that the reward of a recorded sample has changed; see `reward_change_row` for the arguments."""
    if (writer := open_records(options)) is not None:
        writer.write(reward_change_row(sample, function, **changes))


def _fraction(sample: RewardSample) -> float:
    """Return a number from 0 to 1, the same for all samples of a group, and in all processes and runs."""
    name = sample.group or sample.uid or sample.solution_str
    return zlib.crc32(name.encode("utf-8", "backslashreplace")) / 2**32
