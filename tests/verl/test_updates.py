"""Advantages, masks and gradients of real updates, recomputed in float64 from what verl's engines received."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.verl import rewards
from tests.verl.minibatches import Update, recording, updates
from tests.verl.recompute import check_gradients, learnt
from tests.verl.runs import PIPELINE, Run, agent_loop, train

pytestmark = pytest.mark.integration

STEPS = (1, 2)
N = 4
ROWS = 2 * N
"""Rows of a mini-batch."""
KL_COEF = 0.01

AGGREGATION, RANKS = "token-mean", 2

Session = tuple[str, int]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path) -> Run:
    """Three of eight prompts fail in the first step. Of the others, some responses fail, are unscored or have parts
    that do not fit. The first session of each prompt has two outputs."""
    directory = tmp_path_factory.mktemp("updates")
    (directory / "updates").mkdir()
    return train(
        directory,
        tiny_generative_model,
        PIPELINE,
        f"trainer.n_gpus_per_node={RANKS}",
        f"trainer.total_training_steps={max(STEPS)}",
        "trainer.val_before_train=False",
        "data.shuffle=False",
        "reward_loop.max_failed_share=1.0",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.use_kl_loss=True",
        f"actor_rollout_ref.actor.kl_loss_coef={KL_COEF}",
        f"actor_rollout_ref.actor.loss_agg_mode={AGGREGATION}",
        *agent_loop("twofold"),
        function="in_parts",
        environment=recording(directory / "updates"),
    )


@pytest.fixture(scope="module")
def made(run: Run) -> list[Update]:
    assert run.returncode == 0, run.output[-5000:]
    return updates(run.directory / "updates")


def sessions(run: Run, step: int) -> dict[Session, list[dict[str, Any]]]:
    """The outputs of each session of a step."""
    outputs: dict[Session, list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(run.rollouts(step), key=lambda row: int(row["uid"].rsplit("_", 1)[1])):
        prompt, session, _ = row["uid"].rsplit("_", 2)
        outputs[prompt, int(session)].append(row)
    return dict(outputs)


def index_of(outputs: list[dict[str, Any]]) -> int:
    return (int(outputs[-1]["gts"]) - 1) // 2


def trained_score(outputs: list[dict[str, Any]]) -> float | None:
    """What a session is trained with; None if it is masked."""
    return rewards.trained_score(outputs[-1]["output"], index_of(outputs), len(outputs))


def expected_advantages(run: Run, step: int) -> dict[Session, float]:
    """GRPO by hand, of the sessions that are trained on."""
    groups: dict[str, dict[Session, float]] = defaultdict(dict)
    for session, outputs in sessions(run, step).items():
        score = trained_score(outputs)
        if score is not None:
            groups[session[0]][session] = score
    advantages = {}
    for scores in groups.values():
        if len(scores) > 1:  # who is left alone has no baseline
            mean, deviation = statistics.mean(scores.values()), statistics.stdev(scores.values())
            advantages |= {session: (score - mean) / (deviation + 1e-6) for session, score in scores.items()}
    return advantages


def test_updates_train_on_unmasked_samples_with_the_scores_of_the_function(run: Run, made: list[Update]) -> None:
    expected = {session: value for step in STEPS for session, value in expected_advantages(run, step).items()}
    outputs = {session: len(rows) for step in STEPS for session, rows in sessions(run, step).items()}
    assert len(expected) < len(outputs)
    trained: Counter[Session] = Counter()
    for update in made:
        learning = set(learnt(update))
        for row, session in enumerate(update.keys):
            masks = [update.rows[name][row] for name in ("response_mask", "loss_mask")]
            advantages = update.rows["advantages"][row].double()
            if row in learning:
                trained[session] += 1
                assert all(mask.all() for mask in masks)
                assert torch.allclose(advantages, torch.full_like(advantages, expected[session]), atol=1e-4)
            else:
                assert not any(mask.any() for mask in (*masks, advantages))
    assert trained == Counter({session: outputs[session] for session in expected})


def test_a_reward_whose_parts_do_not_fit_is_trained_on_nowhere(run: Run) -> None:
    rejected = 0
    for step in STEPS:
        there = sessions(run, step)
        baselines = {session[0] for session in expected_advantages(run, step)}
        for session, outputs in there.items():
            trained = trained_score(outputs)  # None, as verl writes for a masked session
            assert all(row["score"] == (None if trained is None else pytest.approx(trained)) for row in outputs)
            rejected += rewards.does_not_fit(index_of(outputs), len(outputs)) and session[0] in baselines
    assert rejected, "the run has no rejected session in a group that is trained on"


def test_each_gradient_is_that_of_the_rows_that_are_not_padding(
    made: list[Update], tiny_generative_model: Path
) -> None:
    """Each mini-batch is an update call of its own."""
    for update in made:
        assert learnt(update), "a mini-batch consists of padding only"
        assert (update.ranks, len(update.keys)) == (RANKS, ROWS)
        check_gradients(tiny_generative_model, [update], AGGREGATION, kl_coef=KL_COEF)


def test_a_step_has_as_many_mini_batches_as_its_rows_need(made: list[Update], run: Run) -> None:
    steps = {session[0]: step for step in STEPS for session in sessions(run, step)}
    by_step = defaultdict(list)
    for update in made:
        by_step[steps[update.keys[learnt(update)[0]][0]]].append(len(learnt(update)))
    for step in STEPS:
        rows = sum(len(sessions(run, step)[session]) for session in expected_advantages(run, step))
        assert sum(by_step[step]) == rows
        assert len(by_step[step]) == -(-rows // ROWS)


def test_weights_move_in_updates_only(run: Run, made: list[Update]) -> None:
    for earlier, later in pairwise(made):
        assert all(later.before[name].equal(earlier.after[name]) for name in later.before)
    for step in STEPS:
        assert run.steps[step]["actor/pg_loss"] == run.steps[step]["actor/pg_loss"], "not a number"
