"""What a run of :mod:`tests.verl.rewards` must have led to."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reward_loop.index.index import open_index
from reward_loop.index.phases import StepTimes
from reward_loop.records.reader import RecordsReader
from reward_loop.records.trainer_events import read_events
from reward_loop.view.timeline import timeline
from tests.support.counted import rows_that_count
from tests.verl import rewards
from tests.verl.away import AWAY_S
from tests.verl.minibatches import Update
from tests.verl.recompute import learnt
from tests.verl.runs import Run


def signature(rows: list[dict[str, Any]]) -> Counter[tuple[str, str, float]]:
    return Counter((row["output"], row["gts"], round(row["score"] or 0.0, 6)) for row in rows)


def texts(rows: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter((row["output"], row["gts"]) for row in rows)


def groups(rollouts: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rollouts of a step by prompt."""
    members: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rollouts:
        members[row["uid"].rsplit("_", 2)[0]].append(row)
    return dict(members)


def check_scores(rollouts: list[dict[str, Any]]) -> None:
    """Every score is what :class:`tests.verl.rewards.Held` says of the response."""
    numbers = [rewards.number(row["output"]) for row in rollouts]
    expected = [n % 100 / 100 if n % 7 > 1 else None for n in numbers]  # masked samples have no score
    assert [row["score"] for row in rollouts] == pytest.approx(expected)


def scored_groups(rollouts: list[dict[str, Any]], masked: Collection[int] = (0, 1)) -> list[dict[str, float]]:
    """The scores of each group by sample, without those that are masked.

    Masked is a response whose number has one of these remainders by 7.
    """
    return [
        {row["uid"]: row["score"] for row in group if rewards.number(row["output"]) % 7 not in masked}
        for group in groups(rollouts).values()
    ]


def check_reward_metrics(metrics: dict[str, Any], rollouts: list[dict[str, Any]]) -> None:
    """The metrics of scores and the live numbers are those of the samples, recomputed."""
    # One that is left alone in its group is not trained on.
    trained = [score for scores in scored_groups(rollouts) if len(scores) > 1 for score in scores.values()]
    for name in ("critic/score", "critic/rewards"):
        assert metrics[f"{name}/mean"] == pytest.approx(statistics.mean(trained), abs=1e-6)
        assert metrics[f"{name}/max"] == pytest.approx(max(trained))
        assert metrics[f"{name}/min"] == pytest.approx(min(trained))
    numbers = [rewards.number(row["output"]) for row in rollouts]
    raw = [number % 100 / 100 for number in numbers if number % 7 > 1]
    assert metrics["reward_loop/raw_score/mean"] == pytest.approx(statistics.mean(raw), abs=1e-6)
    assert metrics["reward_loop/scored"] == len(raw)
    assert metrics["reward_loop/unscored"] == sum(number % 7 == 0 for number in numbers)
    assert metrics["reward_loop/failed"] == sum(number % 7 == 1 for number in numbers)
    # Dumps of some modes have 0 for a masked sample.
    equal = [len(set(scores.values())) == 1 for scores in scored_groups(rollouts) if len(scores) > 1]
    expected = {
        "masked_share": statistics.mean(number % 7 <= 1 for number in numbers),
        "no_verdict": statistics.mean(number % 7 == 0 for number in numbers),
        "zero_variance_groups": statistics.mean(equal),
    }
    assert {name: metrics[f"reward_loop/health/{name}"] for name in expected} == pytest.approx(expected)


def check_failure_line(run: Run, of: str, metrics: dict[str, Any], prefix: str = "reward_loop") -> None:
    """The console has one line about the samples of a step without a score, if any: their number, cause and line."""
    lines = [line for line in run.output.splitlines() if re.search(rf"(?<!of ){of}: \d+ (failed|unscored)", line)]
    counts = {name: int(metrics[f"{prefix}/{name}"]) for name in ("failed", "unscored", "scored")}
    without = " and ".join(f"{counts[name]} {name}" for name in ("failed", "unscored") if counts[name])
    if not without:
        assert lines == []
        return
    (line,) = lines
    assert f"{of}: {without} of {sum(counts.values())} samples" in line
    assert re.search(rf": (ValueError in compute_score \({rewards.__file__}:\d+\)|no score from )", line)
    assert f"reward-loop view {run.directory / 'checkpoints' / 'rewards'}" in line


def check_advantages(run: Run, made: list[Update], steps: Iterable[int]) -> None:
    """Each row that an update learns from has the advantage of the function's own scores, by verl's own function, and
    each sample that is not masked is learnt from once."""
    expected, trained = {}, Counter[str]()
    for step in steps:
        rollouts = run.rollouts(step)
        scores = own_scores(rollouts)
        assert {row["uid"]: row["score"] or 0.0 for row in rollouts} == scores
        expected |= _grpo_advantages(rollouts, scores)
    for update in made:
        learning = set(learnt(update))
        for row, (uid, session) in enumerate(update.keys):
            masks = [update.rows[name][row] for name in ("response_mask", "loss_mask")]
            advantages = update.rows["advantages"][row]
            if row in learning:
                name = f"{uid}_{session}_0"
                trained[name] += 1
                assert all(mask.all() for mask in masks)
                # Sums over a group, in any order.
                assert advantages.tolist() == pytest.approx([expected[name]] * len(advantages), rel=1e-6, abs=1e-6)
            else:
                assert not any(mask.any() for mask in (*masks, advantages))
    assert trained == Counter(dict.fromkeys(expected, 1))


def own_scores(rollouts: list[dict[str, Any]]) -> dict[str, float]:
    """What :class:`tests.verl.rewards.Mixed` says of each response, as the float32 that verl trains with."""
    scores = dict.fromkeys((row["uid"] for row in rollouts), 0.0)
    for group in groups(rollouts).values():
        scored = {row["uid"]: n % 100 / 100 for row in group if (n := rewards.number(row["output"])) % 7 > 1}
        halved = rewards.halve_all_but_the_best(list(scored.values())) if scored else []
        scores |= dict(zip(scored, map(float, np.float32(halved)), strict=True))
    return scores


def _grpo_advantages(rollouts: list[dict[str, Any]], scores: dict[str, float]) -> dict[str, float]:
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    trained = advantages_by_uid(rollouts).keys()
    uids = [row["uid"] for row in rollouts if row["uid"] in trained]
    rows = torch.tensor([[scores[uid]] for uid in uids])
    index = np.array([uid.rsplit("_", 2)[0] for uid in uids], dtype=object)
    advantages, _ = compute_grpo_outcome_advantage(rows, torch.ones_like(rows), index)
    return dict(zip(uids, advantages[:, 0].tolist(), strict=True))


def advantages_by_uid(rollouts: list[dict[str, Any]], masked: Collection[int] = (0, 1)) -> dict[str, float]:
    """GRPO by hand: the masked leave their group, and who is left alone has no baseline."""
    advantages = {}
    for scores in scored_groups(rollouts, masked):
        if len(scores) > 1:
            mean, deviation = statistics.mean(scores.values()), statistics.stdev(scores.values())
            advantages |= {uid: (score - mean) / (deviation + 1e-6) for uid, score in scores.items()}
    return advantages


def check_events(
    run: Run, folder: Path, phases_of_mode: set[str], last: int | None = None, killed: int | None = None
) -> None:
    """The events of a run agree with verl's own timings, its rollouts with the rows, its advantages with the scores.

    Args:
        run: a run with :class:`tests.verl.rewards.Mixed`.
        folder: its records.
        phases_of_mode: phases that every step has.
        last: the last step that is checked, if later ones are special.
        killed: the process ID of a killed reward worker: the rows that it had not written yet are lost.
    """
    of_killed = texts([call for call in run.calls if call["pid"] == killed])
    rows = {row["uid"]: row for row in rows_that_count(folder) if not row["validate"]}
    rollouts = {event["uid"]: event for event in read_events(folder) if event["kind"] == "rollout"}
    by_step = StepTimes(folder).steps()
    steps = sorted(step for step in run.steps if step > 0)
    assert sorted(by_step) == steps
    lanes: set[str] = set()
    for step in steps[:last]:
        metrics, seconds = run.steps[step], by_step[step]["phases"]
        timings = run.figures(step, "timing_s/")
        assert phases_of_mode <= seconds.keys()
        for name in seconds.keys() - {"other"}:
            assert seconds[name] == pytest.approx(timings[name], abs=1e-3), (step, name)
        assert {name for name in timings if timings[name] > 0} <= seconds.keys() | {"step", "testing"}
        assert sum(seconds.values()) == pytest.approx(timings["step"], abs=1e-3)
        is_measured = "reward_pipeline/waiting_for_rewards_s" in metrics  # elsewhere, nothing measures the overlap
        assert (by_step[step]["waiting_s"] is not None) == is_measured
        lost = [row for row in run.rollouts(step) if row["uid"].rsplit("_", 1)[0] not in rows]
        assert texts(lost) <= of_killed
        trained = [row["uid"] for row in run.rollouts(step) if row not in lost]
        expected = {uid: mean for uid, mean in advantages_by_uid(run.rollouts(step)).items() if uid in trained}
        recorded = {uid: rows[uid.rsplit("_", 1)[0]].get("advantage") for uid in trained}
        assert {uid: value for uid, value in recorded.items() if value is not None} == pytest.approx(expected, abs=1e-4)
        for uid in trained:
            session = uid.rsplit("_", 1)[0]
            row, event = rows[session], rollouts[session]
            assert event["group"] == row["group"] == session.split("_")[0]
            assert row["step"] == step  # the one that trains on it
            assert event["step"] in (step, None)  # not known yet in some modes
            assert event["generated_step"] == row["generated_step"] <= step
            # Clocks are those of one machine; the row's start is computed from its end.
            assert event["start"] <= event["end"] <= event["scoring"] <= row["time"] - row["total_s"] + 0.05
            assert row["time"] <= event["scored"] + 0.05
        lanes |= check_timeline(folder, step, metrics)
    assert lanes == {"rollout", "judge", "trainer"}


def check_timeline(folder: Path, step: int, metrics: dict[str, Any]) -> set[str]:
    """The timeline covers the step. Returns the kinds of lanes.

    A step whose rewards had all arrived before it began has only the lane of the trainer.
    """
    with open_index(folder) as index:
        found = timeline(index, step)
    assert found["truncated"] == 0
    assert found["end"] - found["start"] > 0.95 * metrics["timing_s/step"]  # with a validation, it is longer
    assert found["longest"].startswith("The longest phase was ")
    return {lane["kind"] for lane in found["lanes"]}


def check_outage(run: Run, steps: Iterable[int]) -> None:
    """Check that samples waited for the judge of `away.py`, visibly, and that none failed because of it."""
    metrics = [run.steps[step] for step in steps]
    assert sum(step["reward_loop/outage/samples"] for step in metrics) > 0
    assert AWAY_S - 2 < max(step["reward_loop/outage/seconds"] for step in metrics) < AWAY_S + 30
    assert re.search(r"judge http://127.0.0.1:\d+ unreachable for \d+ s, \d+ calls? waiting", run.output)
    assert re.search(r"judge http://127.0.0.1:\d+ answers again after \d+ s, continuing \d+ calls?", run.output)
    rows = list(RecordsReader(run.directory / "checkpoints" / "rewards").rows())
    failed = [row["error"] for row in rows if row["outcome"] == "failed"]
    assert not [error for error in failed if "ValueError: no score for" not in error]
    recorded = [row for row in rows if row.get("outage_s")]
    assert len(recorded) >= sum(step["reward_loop/outage/samples"] for step in metrics)
    assert all(row["outage_s"] <= row["wait_s"] for row in recorded)
