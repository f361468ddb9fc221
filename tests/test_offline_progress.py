"""The progress of ``reward-loop score``, and what its calls have used."""

import io
import json

import pytest
from rich.console import Console

import reward_loop
from reward_loop import NaiveRewardLoopManager
from reward_loop.offline.fields import Fields
from reward_loop.offline.folder import ScoredFolder
from reward_loop.offline.inputs import Inputs
from reward_loop.offline.run import LINE_S, ScoringProgress, score_rows


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


LIMITS = {"limits": {"judge": {"max_concurrent": 4}}}


async def judged(solution_str):
    async with reward_loop.limit("judge") as lease:
        lease.used(tokens=1000, cost=0.25)
    if solution_str == "1":
        raise ValueError("one")
    return 0.5


def write(path, rows):
    path.write_text("".join(json.dumps({"solution_str": str(i)}) + "\n" for i in range(rows)))
    return path


def score(folder, manager, console, clock):
    source = write(folder / "in.jsonl", 5)
    with ScoringProgress(5, manager, console, clock) as progress:

        def completed(rows, reward):
            clock.now += LINE_S / 2
            progress.completed(rows, reward)

        with ScoredFolder.open(folder / "out", {}) as scored:
            score_rows(Inputs((source,)), scored, manager, fields=Fields(), concurrency=1, on_row=completed)
    return progress


@pytest.mark.parametrize("is_terminal", [False, True])
def test_failures_mean_tokens_and_cost_are_shown_in_a_bar_or_now_and_then_in_a_line(tmp_path, is_terminal):
    out = io.StringIO()
    manager = NaiveRewardLoopManager({**LIMITS, "log_dir": str(tmp_path / "out")}, compute_score=judged)
    score(tmp_path, manager, Console(file=out, width=200, force_terminal=is_terminal), Clock())
    if is_terminal:
        last = out.getvalue().split("scoring")[-1]
        assert "5/5" in last
        assert "1 failed, mean 0.5, 5,000 tokens, cost 1.25" in last
        assert out.getvalue().count("ValueError: one") == 1
        return
    # The clock advances by half of the interval with each row, and at the start.
    assert out.getvalue().splitlines() == [
        "scoring: 1 of 5 rows, 0 failed, mean 0.5, 1,000 tokens, cost 0.25",
        "failed (further rows with this cause are only counted): sample line 2: judged (test_offline_progress.py) "
        "raised ValueError: one",
        "scoring: 3 of 5 rows, 1 failed, mean 0.5, 3,000 tokens, cost 0.75",
        "scoring: 5 of 5 rows, 1 failed, mean 0.5, 5,000 tokens, cost 1.25",
    ]


def test_tokens_and_cost_are_left_out_if_no_call_has_reported_them(tmp_path):
    out = io.StringIO()
    manager = NaiveRewardLoopManager({"log_dir": str(tmp_path / "out")}, compute_score=lambda solution_str: None)
    assert score(tmp_path, manager, Console(file=out), Clock()).detail() == "0 failed"
