"""The trainer mode ``reward_pipeline``, in real steps of verl's trainer on a CPU."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from reward_loop import cli
from reward_loop.index.index import Index
from reward_loop.index.phases import StepTimes
from reward_loop.records.trainer_events import read_events, seconds_of
from reward_loop.view.app import create_app
from tests.verl.away import judge_that_goes_away
from tests.verl.checks import (
    check_events,
    check_outage,
    groups,
    texts,
)
from tests.verl.runs import Run, agent_loop, json_lines, train

pytestmark = pytest.mark.integration

MODE = "trainer.v1.trainer_mode=reward_pipeline"
PARTS = (
    "generation_s",
    "training_s",
    "waiting_for_rewards_s",
    "waiting_share",
    "judging_s",
    "hidden_share",
    "update_calls",
)


CORRECTION = "algorithm.rollout_correction"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path) -> Run:
    """Both overlaps, two ranks, two agent loop workers, four mini-batches a step, a judge that takes its time and
    scores whole groups, two epochs, warm-ups, verl's correction for off-policy rollouts, and a critic beside it all.
    The judge is away for some time in the second step."""
    with judge_that_goes_away(after=50) as judge:
        return train(
            tmp_path_factory.mktemp("pipeline"),
            tiny_generative_model,
            MODE,
            "data.shuffle=False",
            "trainer.total_training_steps=4",
            "trainer.save_freq=2",
            "trainer.test_freq=4",
            "trainer.n_gpus_per_node=2",
            "actor_rollout_ref.rollout.agent.num_workers=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.ppo_epochs=2",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.optim.lr_warmup_steps=16",
            "actor_rollout_ref.rollout.calculate_log_probs=True",
            f"{CORRECTION}.rollout_is=token",
            "critic.enable=True",
            f"critic.model.path={tiny_generative_model}",
            "critic.optim.lr=1e-3",
            "critic.optim.lr_warmup_steps=8",
            function="Slow",
            environment={"REWARD_JUDGE": judge},
        )


def test_samples_wait_while_the_judge_is_away(run: Run) -> None:
    check_outage(run, range(1, 5))


def test_every_sample_is_scored_and_trained_on_exactly_once(run: Run) -> None:
    assert run.returncode == 0, run.output[-5000:]
    seen = [row for step in range(1, 5) for row in run.rollouts(step)]
    assert len(seen) == 4 * 8 * 4
    assert len({row["uid"] for row in seen}) == len(seen)
    assert texts([call for call in run.calls if call["split"] == "train"]) == texts(seen)


def test_rollouts_are_one_step_old_and_verl_corrects_for_it(run: Run) -> None:
    steps = [run.steps[step] for step in range(1, 5)]
    assert [metrics["reward_pipeline/off_policy_steps"] for metrics in steps] == [0, 1, 1, 1]
    assert [metrics["reward_pipeline/off_policy_share"] for metrics in steps] == [0, 1, 1, 1]
    assert abs(steps[0]["rollout_corr/rollout_is_mean"] - 1) < 1e-4
    # The mean of the weights is close to 1 whatever the policies are; their spread is not.
    spreads = [step["rollout_corr/rollout_is_max"] - step["rollout_corr/rollout_is_min"] for step in steps]
    assert spreads[0] < 1e-3 < max(spreads[1:])


def test_the_parts_of_a_step_add_up_to_its_seconds(run: Run) -> None:
    for step in range(1, 5):
        metrics = run.steps[step]
        part = {name: metrics[f"reward_pipeline/{name}"] for name in PARTS}
        whole = metrics["timing_s/step"] - metrics.get("timing_s/save_checkpoint", 0.0)
        assert part["generation_s"] + part["training_s"] + part["waiting_for_rewards_s"] == pytest.approx(whole)
        assert part["waiting_share"] == pytest.approx(part["waiting_for_rewards_s"] / whole)
        assert 0 <= part["hidden_share"] <= 1
        assert part["judging_s"] > 0  # of the rewards that the step trains on, also if they arrived before
        assert 1 <= part["update_calls"] <= 4
        assert metrics["reward_loop/scored"] + metrics["reward_loop/unscored"] + metrics["reward_loop/failed"] == 32
    # One reward of the first step comes only after the trainer has begun with other groups.
    assert run.steps[1]["reward_pipeline/update_calls"] > 1
    assert run.steps[1]["reward_pipeline/judging_s"] > 0
    assert [run.steps[step]["reward_pipeline/prompts_ahead"] for step in range(1, 5)] == [8, 8, 8, 0]


def test_events_and_advantages_agree_with_verls_timings_and_rollouts(run: Run) -> None:
    phases_of_mode = {"gen", "old_log_prob", "values", "adv", "update_critic", "update_actor", "update_weights"}
    folder = run.directory / "checkpoints" / "rewards"
    check_events(run, folder, phases_of_mode)
    for step, found in StepTimes(folder).steps().items():
        # Each update call is a phase.
        updates = [event for event in read_events(folder, [step]) if event.get("name") == "update_actor"]
        assert len(updates) == run.steps[step]["reward_pipeline/update_calls"]
        waiting = run.steps[step]["reward_pipeline/waiting_for_rewards_s"]
        assert found["waiting_s"] == pytest.approx(waiting, abs=1e-3)


def test_log_report_and_viewer_show_the_same_hidden_share(run: Run) -> None:
    folder = run.directory / "checkpoints" / "rewards"
    logged = {step: run.steps[step]["reward_pipeline/hidden_share"] for step in range(1, 5)}
    assert {step: found["hidden_share"] for step, found in StepTimes(folder).steps().items()} == logged
    with Index(folder) as index:
        index.update()
        with TestClient(create_app(index)) as client:
            rows = client.get("/api/steps").json()["rows"]
    assert {row["step"]: row["hidden_share"] for row in rows} == logged
    shown = CliRunner().invoke(cli.app, ["report", str(folder), "--json"])
    assert {row["step"]: row["hidden_share"] for row in json.loads(shown.output)["overlap"]} == logged
    # Recomputed from the times of the rollouts.
    events = [event for event in read_events(folder) if event["kind"] == "rollout" and not event["validate"]]
    for step in logged:
        pending = [(event["scoring"], event["scored"]) for event in events if event["step"] == step]
        assert len(pending) == 32
        waiting = run.steps[step]["reward_pipeline/waiting_for_rewards_s"]
        assert logged[step] == pytest.approx(max(0.0, 1 - waiting / seconds_of(pending)), abs=1e-6)


def test_rows_have_the_step_that_trains_on_them_before_it_is_over(run: Run) -> None:
    rows = [row for path in (run.directory / "checkpoints" / "rewards").glob("*.jsonl") for row in json_lines(path)]
    written = [row for row in rows if row["kind"] == "sample" and not row["validate"]]
    assert Counter(row["step"] for row in written) == dict.fromkeys(range(1, 5), 32)
    assert Counter((row["step"], row["generated_step"]) for row in written).keys() == {(1, 1), (2, 1), (3, 2), (4, 3)}
    trained = {row["uid"]: row["step"] for row in rows if row["kind"] == "advantage"}
    assert {row["uid"]: row["step"] for row in written} == trained


@pytest.fixture(scope="module")
def picky_run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path) -> Run:
    """Groups without a signal and groups that failed are replaced; some are short, some have more rows than `n`."""
    return train(
        tmp_path_factory.mktemp("picky"),
        tiny_generative_model,
        MODE,
        "trainer.v1.reward_pipeline.one_step_off_policy=False",
        "trainer.total_training_steps=4",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=reward",
        "trainer.v1.sampler.sync_refill_failed_groups=True",
        *agent_loop("uneven"),
        function="rare",
    )


def test_groups_without_a_signal_and_failed_ones_are_replaced(picky_run: Run) -> None:
    assert {1, 2, 3, 4} <= picky_run.steps.keys(), picky_run.output[-5000:]
    trained: set[str] = set()
    for step in range(1, 5):
        rollouts = groups(picky_run.rollouts(step))
        rollouts = {uid: group for uid, group in rollouts.items() if not uid.startswith("pad")}
        assert len(rollouts) == 8
        assert not trained & rollouts.keys()
        trained |= rollouts.keys()
        for group in rollouts.values():
            # verl filters finished groups alone, and not those of which a rollout failed.
            assert len(group) < 4 or {row["score"] for row in group} == {0.0, 1.0}
        assert picky_run.steps[step]["reward_pipeline/off_policy_steps"] <= 1
    thrown = [picky_run.steps[step].get("training/filter_groups/evicted_samples", 0) for step in range(1, 5)]
    assert sum(thrown) > 0
    failed = [picky_run.steps[step].get("training/rollout_failure/evicted_samples", 0) for step in range(1, 5)]
    assert sum(failed) > 0


def test_prompts_are_begun_ahead_of_the_filter_and_the_next_step_trains_on_the_surplus(picky_run: Run) -> None:
    steps = [picky_run.steps[step] for step in range(1, 5)]
    assert all(0 < step["reward_pipeline/filtered_share"] < 1 for step in steps)
    assert steps[0]["reward_pipeline/off_policy_share"] == 0
    assert sum(step["reward_pipeline/prompts_ahead"] for step in steps[:3]) > 0
    for before, step in itertools.pairwise(steps):
        # The groups that are left are the oldest of the next step, except those that the filter removes.
        assert step["reward_pipeline/off_policy_steps"] <= bool(before["reward_pipeline/prompts_ahead"])
    assert any(step["reward_pipeline/off_policy_share"] for step in steps)
