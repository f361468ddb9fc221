"""Real steps of verl's own trainer on a CPU, with rewards from the reward loop."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from reward_loop.records.trainer_events import health
from tests.verl import rewards
from tests.verl.checks import (
    advantages_by_uid,
    check_advantages,
    check_events,
    check_failure_line,
    check_reward_metrics,
    signature,
    texts,
)
from tests.verl.minibatches import Update, recording, updates
from tests.verl.recompute import check_gradients, learnt
from tests.verl.rewards import STEPS
from tests.verl.runs import Run, agent_loop, train

pytestmark = pytest.mark.integration

AGGREGATION = "seq-mean-token-mean"
KL_COEF = 0.01
MINI_BATCH = 2 * 4
"""Rows of a mini-batch."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path, tiny_discriminative_model: Path) -> Run:
    """Two data-parallel ranks, a reference model, validation; some samples unscored, some failed. A reward model, whose
    server is killed; then a reward worker is killed; and after two steps there is Ctrl-C."""
    directory = tmp_path_factory.mktemp("harried")
    (directory / "updates").mkdir()
    return train(
        directory,
        tiny_generative_model,
        "trainer.total_training_steps=1000",
        f"trainer.test_freq={STEPS[-1]}",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        f"actor_rollout_ref.actor.kl_loss_coef={KL_COEF}",
        f"actor_rollout_ref.actor.loss_agg_mode={AGGREGATION}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "reward.num_workers=2",
        "reward_loop.health.patience=1",
        "reward_loop.health.masked_share=0",
        "reward_model.enable=True",
        f"reward_model.model.path={tiny_discriminative_model}",
        f"+custom_reward_function.reward_kwargs.model={tiny_discriminative_model}",
        *agent_loop("seeded"),
        function="Mixed",
        environment=recording(directory / "updates"),
        own_ray=True,
        returncode=130,
    )


def test_killed_servers_and_workers_lose_nothing(run: Run) -> None:
    assert (run.directory / "killed-server").exists()
    dead = int((run.directory / "killed-worker").read_text())
    seen = [row for step in STEPS for row in run.rollouts(step)]
    assert len(seen) == len({row["uid"] for row in seen}) == len(STEPS) * 8 * 4
    trained = [call for call in run.calls if call["split"] == "train"]
    assert not texts(seen) - texts(trained)
    # Only what the dead worker was scoring is scored again.
    repeated = texts(trained) - texts(seen)
    assert repeated <= texts([call for call in trained if call["pid"] == dead]), repeated


def test_each_sample_of_a_validation_is_scored_exactly_once(run: Run) -> None:
    validated = [row for step in (0, STEPS[-1]) for row in run.validation(step)]
    scored = [call for call in run.calls if call["split"] == "val" and call["outcome"] == "scored"]
    assert signature(scored) == signature(validated)


def test_a_function_gets_what_it_asks_for(run: Run, tiny_generative_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_generative_model)
    for call in run.calls:
        asked = call["asked"]
        (message,) = asked["prompt"]
        first = (int(call["gts"]) - 1) // 2
        assert message == {"role": "user", "content": f"{first}+{first + 1}="}
        ids = asked["response_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == call["output"]
        assert asked["response_length"] == len(ids)
        assert asked["is_truncated"] == (len(ids) == 12 and ids[-1] != tokenizer.eos_token_id)
        assert asked["validate"] == (call["split"] == "val")
        assert asked["training_progress"] == pytest.approx(asked["global_steps"] / 1000)
    assert {call["asked"]["global_steps"] for call in run.calls if call["split"] == "train"} == set(STEPS)
    assert {call["asked"]["is_truncated"] for call in run.calls} == {True, False}


def test_outcomes_reach_the_metrics(run: Run) -> None:
    for step in STEPS:
        metrics = run.steps[step]
        numbers = [rewards.number(row["output"]) for row in run.rollouts(step)]
        check_reward_metrics(metrics, run.rollouts(step))
        scores = [(n % 100) / 100 for n in numbers if n % 7 > 1]
        assert metrics["reward_loop/score/mean"] == pytest.approx(statistics.mean(scores))
        ragged = [n % 10 for n in numbers if n % 7 > 1 and n % 3 == 0]
        assert metrics["reward_loop/key_0/mean"] == pytest.approx(statistics.mean(ragged))


def test_the_console_has_one_line_for_each_step_and_validation_with_failures(run: Run) -> None:
    for step in STEPS:
        check_failure_line(run, f"step {step}", run.steps[step])
    for step in (0, STEPS[-1]):
        check_failure_line(run, f"validation of step {step}", run.steps[step], "val-aux/reward_outcome")


def test_validation_means_are_over_the_scored_samples(run: Run) -> None:
    for step in (0, STEPS[-1]):
        numbers = [rewards.number(row["output"]) for row in run.validation(step)]
        assert all(n % 7 > 1 for n in numbers), "the masked samples have left"
        scores = [(n % 100) / 100 for n in numbers]
        assert run.steps[step]["val-core/sums/reward/mean@1"] == pytest.approx(statistics.mean(scores))
        assert run.steps[step]["val-aux/reward_outcome/scored"] == len(scores)


def test_events_and_advantages_agree_with_verls_timings_and_rollouts(run: Run) -> None:
    phases_of_mode = {"gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights"}
    killed = int((run.directory / "killed-worker").read_text())
    check_events(run, run.directory / "checkpoints" / "rewards", phases_of_mode, killed=killed)


def test_the_monitors_of_health_agree_with_the_rollouts_and_the_records(run: Run) -> None:
    folder = run.directory / "checkpoints" / "rewards"
    (file,) = (folder / "health").glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    recorded = {line["step"]: line["values"] for line in lines if line["kind"] == "values"}
    assert list(recorded) == list(STEPS)
    for step in STEPS:
        values = {name: run.steps[step][f"reward_loop/health/{name}"] for name in recorded[step]}
        assert recorded[step] == pytest.approx(values)
    # Some samples are masked in each step, and the limit is 0.
    (warning,) = [warning for warning in health(folder) if warning["monitor"] == "masked_share"]
    assert (warning["step"], warning["since"], warning["threshold"]) == (1, 1, 0)
    begun = [warning for warning in health(folder) if warning["step"] == 1]
    assert run.steps[1]["reward_loop/health/warnings"] == len(begun)
    logged = [line for line in run.output.splitlines() if "reward_loop.health.masked_share: " in line]
    assert len(logged) == 1
    assert re.search(r": In step 1, \d+% of the samples are masked \(limit 0%\)\. ", logged[0])
    assert str(folder) in logged[0]


def test_training_metrics_are_finite(run: Run) -> None:
    for step in STEPS:
        metrics = run.steps[step]
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        assert {name for name, value in numbers.items() if not math.isfinite(value)} == set()
        assert metrics["actor/grad_norm"] > 0
        # The rollout and the trainer must agree on the policy, or the gradient is that of another one.
        assert metrics["training/rollout_probs_diff_max"] < 5e-4


@pytest.fixture(scope="module")
def made(run: Run) -> list[Update]:
    return updates(run.directory / "updates")


def calls_of_updates(run: Run, made: list[Update]) -> dict[int, list[Update]]:
    """The updates of each step: verl makes one update call in a step, of one or more mini-batches."""
    steps = {row["uid"].split("_")[0]: step for step in STEPS for row in run.rollouts(step)}
    calls = defaultdict(list)
    for update in made:
        assert (update.ranks, len(update.keys)) == (2, MINI_BATCH)
        calls[steps[update.keys[learnt(update)[0]][0]]].append(update)
    return dict(calls)


def test_each_gradient_is_that_of_the_rows_that_are_not_padding(
    run: Run, made: list[Update], tiny_generative_model: Path
) -> None:
    last = calls_of_updates(run, made)[STEPS[-1]]
    check_gradients(tiny_generative_model, last, AGGREGATION, kl_coef=KL_COEF)


def test_padding_is_spread_over_the_mini_batches_of_an_update_call(run: Run, made: list[Update]) -> None:
    for step, call in calls_of_updates(run, made).items():
        counts = [len(learnt(update)) for update in call]
        assert sum(counts) == len(advantages_by_uid(run.rollouts(step)))
        assert len(counts) == -(-sum(counts) // MINI_BATCH)
        assert max(counts) - min(counts) <= 1


def test_updates_have_the_advantages_of_the_functions_own_scores(run: Run, made: list[Update]) -> None:
    check_advantages(run, made, STEPS)


def test_ctrl_c_leaves_no_process(run: Run, tiny_discriminative_model: Path) -> None:
    assert run.returncode == 130, run.output[-5000:]
    assert any("Interrupted" in line for line in run.output.strip().splitlines()[-5:])
    assert rewards.processes_left("reward_loop.router", str(tiny_discriminative_model)) == []
