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
from tests.support.counted import rows_that_count
from tests.verl import rewards
from tests.verl.away import judge_that_goes_away
from tests.verl.checks import check_advantages, check_events, check_outage, groups, texts
from tests.verl.minibatches import Update, recording, updates
from tests.verl.recompute import check_gradients, learnt
from tests.verl.runs import PIPELINE, Run, agent_loop, json_lines, train, write_data

pytestmark = pytest.mark.integration

STEPS = range(1, 5)
RANKS, N, MINI_BATCH = 2, 4, 2
KL_COEF = 0.01


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path) -> Run:
    """Both overlaps, two ranks, two agent loop workers, four mini-batches a step, a judge that takes its time and
    scores whole groups, warm-ups, verl's correction for off-policy rollouts, a reference model, and a critic beside it
    all. The judge is away for some time in the second step."""
    directory = tmp_path_factory.mktemp("pipeline")
    (directory / "updates").mkdir()
    with judge_that_goes_away(after=50) as judge:
        return train(
            directory,
            tiny_generative_model,
            PIPELINE,
            "data.shuffle=False",
            f"trainer.total_training_steps={STEPS[-1]}",
            "trainer.save_freq=2",
            "trainer.test_freq=4",
            f"trainer.n_gpus_per_node={RANKS}",
            "actor_rollout_ref.rollout.agent.num_workers=2",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}",
            "actor_rollout_ref.actor.use_kl_loss=True",
            f"actor_rollout_ref.actor.kl_loss_coef={KL_COEF}",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.optim.lr_warmup_steps=16",
            "actor_rollout_ref.rollout.calculate_log_probs=True",
            "algorithm.rollout_correction.rollout_is=token",
            "critic.enable=True",
            f"critic.model.path={tiny_generative_model}",
            "critic.optim.lr=1e-3",
            "critic.optim.lr_warmup_steps=8",
            function="Slow",
            environment={"REWARD_JUDGE": judge, **recording(directory / "updates")},
        )


@pytest.fixture(scope="module")
def made(run: Run) -> list[Update]:
    return updates(run.directory / "updates")


def test_samples_wait_while_the_judge_is_away(run: Run) -> None:
    check_outage(run, STEPS)


def test_every_sample_is_scored_and_trained_on_exactly_once(run: Run) -> None:
    assert run.returncode == 0, run.output[-5000:]
    seen = [row for step in STEPS for row in run.rollouts(step)]
    assert len(seen) == 4 * 8 * 4
    assert len({row["uid"] for row in seen}) == len(seen)
    assert texts([call for call in run.calls if call["split"] == "train"]) == texts(seen)


def test_rollouts_are_one_step_old_and_verl_corrects_for_it(run: Run) -> None:
    steps = [run.steps[step] for step in STEPS]
    assert [metrics["reward_pipeline/off_policy_steps"] for metrics in steps] == [0, 1, 1, 1]
    assert [metrics["reward_pipeline/off_policy_share"] for metrics in steps] == [0, 1, 1, 1]
    assert abs(steps[0]["rollout_corr/rollout_is_mean"] - 1) < 1e-4
    # The mean of the weights is close to 1 whatever the policies are; their spread is not.
    spreads = [step["rollout_corr/rollout_is_max"] - step["rollout_corr/rollout_is_min"] for step in steps]
    assert spreads[0] < 1e-3 < max(spreads[1:])


def test_the_parts_of_a_step_add_up_to_its_seconds(run: Run) -> None:
    for step in STEPS:
        metrics = run.steps[step]
        part = run.figures(step, "reward_pipeline/")
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
    assert [run.steps[step]["reward_pipeline/prompts_ahead"] for step in STEPS] == [8, 8, 8, 0]


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
    logged = {step: run.steps[step]["reward_pipeline/hidden_share"] for step in STEPS}
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
    assert Counter(row["step"] for row in written) == dict.fromkeys(STEPS, 32)
    assert Counter((row["step"], row["generated_step"]) for row in written).keys() == {(1, 1), (2, 1), (3, 2), (4, 3)}
    trained = {row["uid"]: row["step"] for row in rows if row["kind"] == "advantage"}
    assert {row["uid"]: row["step"] for row in written} == trained


def test_updates_train_once_on_each_sample_with_the_advantages_of_the_functions_own_scores(
    run: Run, made: list[Update]
) -> None:
    check_advantages(run, made, STEPS)


def test_each_gradient_is_that_of_the_rows_that_are_not_padding(
    run: Run, made: list[Update], tiny_generative_model: Path
) -> None:
    """Each mini-batch is an update call of its own. The last step's rollouts are off-policy."""
    last = [update for update in made if step_of(run, update) == STEPS[-1]]
    assert last
    for update in last:
        check_gradients(tiny_generative_model, [update], "token-mean", kl_coef=KL_COEF)


def test_a_step_has_as_many_mini_batches_as_its_rows_need(run: Run, made: list[Update]) -> None:
    by_step: dict[int, list[int]] = {step: [] for step in STEPS}
    for update in made:
        assert (update.ranks, len(update.keys)) == (RANKS, MINI_BATCH * N)
        by_step[step_of(run, update)].append(len(learnt(update)))
    for rows in by_step.values():
        assert 0 not in rows, "a mini-batch consists of padding only"
        assert len(rows) == -(-sum(rows) // (MINI_BATCH * N))


def test_weights_move_in_updates_only(made: list[Update]) -> None:
    for earlier, later in itertools.pairwise(made):
        assert all(later.before[name].equal(earlier.after[name]) for name in later.before)


def step_of(run: Run, update: Update) -> int:
    prompt = update.keys[learnt(update)[0]][0]
    return next(step for step in STEPS if any(row["uid"].startswith(prompt) for row in run.rollouts(step)))


@pytest.fixture(scope="module")
def picky_run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path) -> Run:
    """Groups without a signal and groups that failed are replaced; some are short, some have more rows than `n`. Half
    of the prompts are games of ``examples/guessing``, which request their rewards themselves."""
    directory = tmp_path_factory.mktemp("picky")
    write_data(directory, agents=("uneven", "guessing"))
    return train(
        directory,
        tiny_generative_model,
        PIPELINE,
        "trainer.v1.reward_pipeline.one_step_off_policy=False",
        "trainer.total_training_steps=4",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=False",
        "data.max_response_length=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=reward",
        "trainer.v1.sampler.sync_refill_failed_groups=True",
        *agent_loop("uneven"),
        function="rare",
    )


def test_groups_without_a_signal_and_failed_ones_are_replaced(picky_run: Run) -> None:
    assert set(STEPS) <= picky_run.steps.keys(), picky_run.output[-5000:]
    trained: set[str] = set()
    for step in STEPS:
        rollouts = groups(picky_run.rollouts(step))
        rollouts = {uid: group for uid, group in rollouts.items() if not uid.startswith("pad")}
        assert len(rollouts) == 8
        assert not trained & rollouts.keys()
        trained |= rollouts.keys()
        for group in rollouts.values():
            scores = {row["uid"].rsplit("_", 2)[1]: row["score"] for row in group if row["score"] is not None}
            # verl filters finished groups alone, and not those of which a rollout failed. A single score says nothing.
            assert len(group) < 4 or len(scores) < 2 or set(scores.values()) == {0.0, 1.0}
        assert picky_run.steps[step]["reward_pipeline/off_policy_steps"] <= 1
    thrown = [picky_run.steps[step].get("training/filter_groups/evicted_samples", 0) for step in STEPS]
    assert sum(thrown) > 0
    failed = [picky_run.steps[step].get("training/rollout_failure/evicted_samples", 0) for step in STEPS]
    assert sum(failed) > 0


def test_prompts_are_begun_ahead_of_the_filter_and_the_next_step_trains_on_the_surplus(picky_run: Run) -> None:
    steps = [picky_run.steps[step] for step in STEPS]
    assert all(0 < step["reward_pipeline/filtered_share"] < 1 for step in steps)
    assert steps[0]["reward_pipeline/off_policy_share"] == 0
    assert sum(step["reward_pipeline/prompts_ahead"] for step in steps[:3]) > 0
    for before, step in itertools.pairwise(steps):
        # The groups that are left are the oldest of the next step, except those that the filter removes.
        assert step["reward_pipeline/off_policy_steps"] <= bool(before["reward_pipeline/prompts_ahead"])
    assert any(step["reward_pipeline/off_policy_share"] for step in steps)


def test_every_game_is_judged_once_by_the_environment(picky_run: Run) -> None:
    trained = {row["uid"].rsplit("_", 1)[0] for step in STEPS for row in picky_run.rollouts(step)}
    rows = rows_that_count(picky_run.directory / "checkpoints" / "rewards")
    games = [row for row in rows if rewards.GONE in (row["error"] or "") or "guesses" in (row["components"] or {})]
    assert len({row["uid"] for row in games}) == len(games)
    assert trained & {row["uid"] for row in games}
    calls = picky_run.calls
    assert len(calls) == sum(row["attempts"] for row in games)  # a judge that is gone is asked again
    outcomes = Counter(row["outcome"] for row in games)
    assert sum(call["outcome"] == "scored" for call in calls) == outcomes["scored"]
    assert outcomes["failed"] > 0
    assert max(len(call["guesses"]) for call in calls) > 1, "no game has several turns"
