"""Scores files of stored rollouts with the managers and functions of a training run. Runs are resumable."""

from __future__ import annotations

from reward_loop.offline.inputs import Inputs
from reward_loop.offline.partial import PartialResults
from reward_loop.offline.rows import Fields, Row, check_input, count_rows, read_rows
from reward_loop.offline.run import Summary, score_file

__all__ = [
    "Fields",
    "Inputs",
    "PartialResults",
    "Row",
    "Summary",
    "check_input",
    "count_rows",
    "read_rows",
    "score_file",
]
