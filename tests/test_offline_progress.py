"""The progress of ``reward-loop score``."""

import io
import json

from rich.console import Console

from reward_loop import NaiveRewardLoopManager
from reward_loop.offline.inputs import Fields, Inputs
from reward_loop.offline.score import LINE_S, ScoredFolder, ScoringProgress, score_rows


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


async def judged(solution_str):
    if solution_str == "1":
        raise ValueError("one")
    return 0.5


def test_failures_are_shown_now_and_then_in_a_line(tmp_path):
    out, clock = io.StringIO(), Clock()
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"solution_str": str(i)}) + "\n" for i in range(5)))
    manager = NaiveRewardLoopManager({"log_dir": str(tmp_path / "out")}, compute_score=judged)
    progress = ScoringProgress(Console(file=out, width=200), clock)

    def completed(rows, result):
        clock.now += LINE_S / 2
        progress.completed(rows, result)

    with ScoredFolder.open(tmp_path / "out", {}) as folder:
        source = Inputs(tmp_path / "in.jsonl")
        score_rows(source, folder, manager, fields=Fields(), concurrency=1, on_row=completed)
    # The clock advances by half of the interval with each row, and at the start.
    assert out.getvalue().splitlines() == [
        "scoring: 1 rows, 0 failed",
        "failed (further rows with this cause are only counted): sample line 2: judged (test_offline_progress.py) "
        "raised ValueError: one",
        "scoring: 3 rows, 1 failed",
        "scoring: 5 rows, 1 failed",
    ]
