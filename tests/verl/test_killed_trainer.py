"""A run of verl that was killed while rollouts were failed or open, and what the same command makes of its checkpoint:
a run that ends because its agent loop worker is killed, and one that trains to the end."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from reward_loop.index.index import Index
from reward_loop.index.phases import StepTimes
from reward_loop.view.app import create_app
from tests.support.counted import rows_that_count
from tests.verl import rewards
from tests.verl.checks import advantages_by_uid, groups
from tests.verl.minibatches import Update, recording, updates
from tests.verl.recompute import learnt
from tests.verl.runs import Run, train, write_data

pytestmark = pytest.mark.integration

STEPS = range(1, 6)
ROWS = 4 * rewards.BATCH


@dataclass
class Part:
    """One of the commands. They share a directory, whose metrics are those of the last one."""

    run: Run
    steps: dict[int, dict[str, Any]]
    updates: list[Update]
    calls: list[dict[str, Any]]
    """Those of this command."""

    def checkpoint(self) -> tuple[int, ...]:
        """The prompts that the command found in its checkpoint: all, those with all scores, those generated again."""
        (line,) = re.findall(r"the checkpoint has .* are generated again", self.run.output)
        return tuple(map(int, re.findall(r"\d+", line)))


def command(directory: Path, policy: Path, part: str, returncode: int | None) -> Part:
    (directory / part).mkdir(exist_ok=True)
    before = len(Run(None, "", directory).calls) if (directory / "calls.jsonl").exists() else 0
    run = train(
        directory,
        policy,
        "trainer.v1.trainer_mode=reward_pipeline",
        f"trainer.total_training_steps={STEPS[-1]}",
        "trainer.save_freq=1",
        "trainer.val_before_train=False",
        "data.shuffle=False",
        "reward_loop.max_failed_share=1.0",  # a step without a score ends the run, after the checkpoint before
        function="Away",
        environment=recording(directory / part),
        returncode=returncode,
    )
    return Part(run, run.steps, updates(directory / part), run.calls[before:])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path) -> Part:
    directory = tmp_path_factory.mktemp("killed")
    write_data(directory, prompts=len(STEPS) * rewards.BATCH)
    return command(directory, tiny_generative_model, "killed", None)


@pytest.fixture(scope="module")
def ended(killed: Part, tiny_generative_model: Path) -> Part:
    return command(killed.run.directory, tiny_generative_model, "ended", 1)


@pytest.fixture(scope="module")
def resumed(ended: Part, tiny_generative_model: Path) -> Part:
    return command(ended.run.directory, tiny_generative_model, "resumed", 0)


def step_of(call: dict[str, Any]) -> int:
    return (int(call["gts"]) - 1) // 2 // rewards.BATCH + 1


def samples(calls: list[dict[str, Any]], step: int, *outcomes: str) -> Counter[tuple[str, str]]:
    """The responses of a step in these calls, with these outcomes."""
    return Counter(
        (call["output"], call["gts"])
        for call in calls
        if call["split"] == "train" and step_of(call) == step and (not outcomes or call["outcome"] in outcomes)
    )


def records(run: Run, step: int) -> dict[str, dict[str, Any]]:
    """The latest record of each rollout of a step, by its name."""
    names = {row["uid"].rsplit("_", 1)[0] for row in run.rollouts(step)}
    rows = rows_that_count(run.directory / "checkpoints" / "rewards")
    return {row["uid"]: row for row in rows if row["uid"] in names}


def test_the_viewer_shows_a_run_that_was_killed(killed: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = killed.run.directory / "checkpoints" / "rewards"
    for step in (1, 2):
        recorded = records(killed.run, step)
        assert len(recorded) == ROWS
        for rollout in killed.run.rollouts(step):
            record = recorded[rollout["uid"].rsplit("_", 1)[0]]
            assert (record["step"], record["outcome"]) == (step, "scored")
            assert record["reward"] == pytest.approx(rollout["score"])
    assert StepTimes(folder).steps()[1]["phases"]["update_actor"] == pytest.approx(
        killed.steps[1]["timing_s/update_actor"], abs=1e-3
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    counted = {row["uid"] for row in rows_that_count(folder)}
    with Index(folder) as index:
        index.update()
        with TestClient(create_app(index)) as viewer:
            assert viewer.get("/api/run").json()["samples"] == len(counted)
            shown = viewer.get("/api/samples?step=2&limit=1").json()["rows"][0]
            assert viewer.get(f"/api/sample/{shown['id']}").json()["texts"]["response"]


def check_resumed(before: Part, after: Part, step: int) -> None:
    """Prompts whose rollouts all had a score when a process was killed keep them; all others were generated again."""
    seen, again = samples(before.calls, step), samples(after.calls, step)
    prompts = {prompt for _, prompt in seen}
    lost = {prompt for _, prompt in samples(before.calls, step, "open", "away")}
    assert 4 <= len(lost) < len(prompts) == rewards.BATCH
    assert after.checkpoint() == (len(prompts), len(prompts - lost), len(lost))
    assert Counter(prompt for _, prompt in again.elements()) == dict.fromkeys(lost, 4)
    trained = Counter((row["output"], row["gts"]) for row in after.run.rollouts(step))
    assert trained == again + Counter({sample: n for sample, n in seen.items() if sample[1] not in lost})
    assert after.steps[step]["reward_loop/scored"] == ROWS


def test_the_same_command_generates_again_what_lacked_a_score_and_keeps_the_rest(killed: Part, ended: Part) -> None:
    check_resumed(killed, ended, 3)


def test_a_killed_agent_loop_worker_ends_the_run_with_its_cause(ended: Part) -> None:
    assert sorted(ended.steps) == [3]
    assert "agent loop worker 0 died: does the agent loop" in ended.run.output
    assert "Run the same command again: it resumes from the last checkpoint" in ended.run.output


def test_after_the_death_of_the_worker_the_same_command_trains_to_the_end(ended: Part, resumed: Part) -> None:
    check_resumed(ended, resumed, 4)
    assert sorted(resumed.steps) == [4, 5]


def test_over_all_commands_each_sample_is_trained_on_once_with_its_score(
    killed: Part, ended: Part, resumed: Part
) -> None:
    expected: dict[tuple[str, int], float] = {}
    for step in STEPS:
        rollouts = resumed.run.rollouts(step)
        assert len({row["uid"] for row in rollouts}) == ROWS
        assert {step_of(row) for row in rollouts} == {step}
        assert len(groups(rollouts)) == rewards.BATCH
        for uid, advantage in advantages_by_uid(rollouts, masked=()).items():
            prompt, session, _ = uid.rsplit("_", 2)
            expected[prompt, int(session)] = advantage
    trained: Counter[tuple[str, int]] = Counter()
    for update in killed.updates + ended.updates + resumed.updates:
        for row in learnt(update):
            session = update.keys[row]
            trained[session] += 1
            advantages = update.rows["advantages"][row].double()
            assert torch.allclose(advantages, torch.full_like(advantages, expected[session]), atol=1e-4)
    assert trained == Counter(dict.fromkeys(expected, 1))
