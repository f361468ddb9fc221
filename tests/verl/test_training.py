"""Real steps of verl's own trainer on a CPU, with rewards from the reward loop."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from reward_loop.records.trainer_events import health
from tests.verl import rewards
from tests.verl.away import judge_that_goes_away
from tests.verl.checks import (
    advantages_by_uid,
    check_events,
    check_failure_line,
    check_health,
    check_outage,
    check_reward_metrics,
    expected_advantages,
    groups,
    signature,
    texts,
)
from tests.verl.minibatches import Update, recording, updates
from tests.verl.recompute import check_gradients, learnt
from tests.verl.runs import Run, agent_loop, train

pytestmark = pytest.mark.integration

AGGREGATION = "seq-mean-token-mean"
KL_COEF = 0.01
MINI_BATCH = 2 * 4
"""Rows of a mini-batch."""


@pytest.fixture(scope="module")
def mixed_run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path) -> Run:
    """Two data-parallel ranks, a reference model, validation; some samples unscored, some failed.

    The judge is away for some time in the second step."""
    directory = tmp_path_factory.mktemp("mixed")
    (directory / "updates").mkdir()
    with judge_that_goes_away(after=68) as judge:
        return train(
            directory,
            tiny_generative_model,
            "trainer.total_training_steps=3",
            "trainer.test_freq=3",
            "trainer.n_gpus_per_node=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.use_kl_loss=True",
            f"actor_rollout_ref.actor.kl_loss_coef={KL_COEF}",
            f"actor_rollout_ref.actor.loss_agg_mode={AGGREGATION}",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "reward.num_workers=2",
            "reward_loop.health.patience=1",
            "reward_loop.health.masked_share=0",
            *agent_loop("seeded"),
            function="Mixed",
            environment={"REWARD_JUDGE": judge, **recording(directory / "updates")},
        )


def test_samples_wait_while_the_judge_is_away(mixed_run: Run) -> None:
    check_outage(mixed_run, range(1, 4))


def test_every_sample_is_scored_exactly_once(mixed_run: Run) -> None:
    assert mixed_run.returncode == 0, mixed_run.output[-5000:]
    seen = [row for step in (1, 2, 3) for row in mixed_run.rollouts(step)]
    assert len(seen) == 3 * 8 * 4
    calls = [call for call in mixed_run.calls if call["split"] == "train"]
    assert texts(calls) == texts(seen)
    validated = [row for step in (0, 3) for row in mixed_run.validation(step)]
    scored = [call for call in mixed_run.calls if call["split"] == "val" and call["outcome"] == "scored"]
    assert signature(scored) == signature(validated)


def test_a_function_gets_what_it_asks_for(mixed_run: Run, tiny_generative_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_generative_model)
    for call in mixed_run.calls:
        asked = call["asked"]
        (message,) = asked["prompt"]
        first = (int(call["gts"]) - 1) // 2
        assert message == {"role": "user", "content": f"{first}+{first + 1}="}
        ids = asked["response_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == call["output"]
        assert asked["response_length"] == len(ids)
        assert asked["is_truncated"] == (len(ids) == 12 and ids[-1] != tokenizer.eos_token_id)
        assert asked["validate"] == (call["split"] == "val")
        assert asked["training_progress"] == pytest.approx(asked["global_steps"] / 3)
    assert {call["asked"]["global_steps"] for call in mixed_run.calls if call["split"] == "train"} == {1, 2, 3}
    assert {call["asked"]["is_truncated"] for call in mixed_run.calls} == {True, False}


def test_outcomes_reach_the_metrics(mixed_run: Run) -> None:
    for step in (1, 2, 3):
        metrics = mixed_run.steps[step]
        numbers = [rewards.number(row["output"]) for row in mixed_run.rollouts(step)]
        check_reward_metrics(metrics, mixed_run.rollouts(step))
        scores = [(n % 100) / 100 for n in numbers if n % 7 > 1]
        assert metrics["reward_loop/score/mean"] == pytest.approx(statistics.mean(scores))
        ragged = [n % 10 for n in numbers if n % 7 > 1 and n % 3 == 0]
        assert metrics["reward_loop/key_0/mean"] == pytest.approx(statistics.mean(ragged))


def test_the_console_has_one_line_for_each_step_and_validation_with_failures(mixed_run: Run) -> None:
    for step in (1, 2, 3):
        check_failure_line(mixed_run, f"step {step}", mixed_run.steps[step])
    for step in (0, 3):
        check_failure_line(mixed_run, f"validation of step {step}", mixed_run.steps[step], "val-aux/reward_outcome")


def test_validation_means_are_over_the_scored_samples(mixed_run: Run) -> None:
    for step in (0, 3):
        numbers = [rewards.number(row["output"]) for row in mixed_run.validation(step)]
        assert all(n % 7 > 1 for n in numbers), "the masked samples have left"
        scores = [(n % 100) / 100 for n in numbers]
        assert mixed_run.steps[step]["val-core/sums/reward/mean@1"] == pytest.approx(statistics.mean(scores))
        assert mixed_run.steps[step]["val-aux/reward_outcome/scored"] == len(scores)


def test_events_and_advantages_agree_with_verls_timings_and_rollouts(mixed_run: Run) -> None:
    phases_of_mode = {"gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights"}
    check_events(mixed_run, mixed_run.directory / "checkpoints" / "rewards", phases_of_mode)


def test_the_monitors_of_health_agree_with_the_rollouts_and_the_records(mixed_run: Run) -> None:
    folder = mixed_run.directory / "checkpoints" / "rewards"
    (file,) = (folder / "health").glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    recorded = {line["step"]: line["values"] for line in lines if line["kind"] == "values"}
    assert list(recorded) == [1, 2, 3]
    for step in (1, 2, 3):
        check_health(mixed_run.steps[step], mixed_run.rollouts(step))
        values = {name: mixed_run.steps[step][f"reward_loop/health/{name}"] for name in recorded[step]}
        assert recorded[step] == pytest.approx(values)
    # Some samples are masked in each step, and the limit is 0.
    (warning,) = [warning for warning in health(folder) if warning["monitor"] == "masked_share"]
    assert (warning["step"], warning["since"], warning["threshold"]) == (1, 1, 0)
    logged = [line for line in mixed_run.output.splitlines() if "reward_loop.health.masked_share: " in line]
    assert len(logged) == 1
    assert str(folder) in logged[0]


def test_training_metrics_are_finite(mixed_run: Run) -> None:
    for step in (1, 2, 3):
        metrics = mixed_run.steps[step]
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        assert {name for name, value in numbers.items() if not math.isfinite(value)} == set()
        assert metrics["actor/grad_norm"] > 0
        # The rollout and the trainer must agree on the policy, or the gradient is that of another one.
        assert metrics["training/rollout_probs_diff_max"] < 5e-4


@pytest.fixture(scope="module")
def made(mixed_run: Run) -> list[Update]:
    return updates(mixed_run.directory / "updates")


def calls_of_updates(run: Run, made: list[Update]) -> dict[int, list[Update]]:
    """The updates of each step: verl makes one update call in a step, of one or more mini-batches."""
    steps = {row["uid"].split("_")[0]: step for step in (1, 2, 3) for row in run.rollouts(step)}
    calls = defaultdict(list)
    for update in made:
        assert (update.ranks, len(update.keys)) == (2, MINI_BATCH)
        calls[steps[update.keys[learnt(update)[0]][0]]].append(update)
    return dict(calls)


def test_each_gradient_is_that_of_the_rows_that_are_not_padding(
    mixed_run: Run, made: list[Update], tiny_generative_model: Path
) -> None:
    last = calls_of_updates(mixed_run, made)[3]
    check_gradients(tiny_generative_model, last, AGGREGATION, kl_coef=KL_COEF)


def test_padding_is_spread_over_the_mini_batches_of_an_update_call(mixed_run: Run, made: list[Update]) -> None:
    for step, call in calls_of_updates(mixed_run, made).items():
        counts = [len(learnt(update)) for update in call]
        assert sum(counts) == len(expected_advantages(mixed_run.rollouts(step)))
        assert len(counts) == -(-sum(counts) // MINI_BATCH)
        assert max(counts) - min(counts) <= 1


def test_updates_have_the_advantages_of_the_functions_own_scores(mixed_run: Run, made: list[Update]) -> None:
    expected = {}
    for step in (1, 2, 3):
        rollouts = mixed_run.rollouts(step)
        scores = own_scores(rollouts)
        assert {row["uid"]: row["score"] or 0.0 for row in rollouts} == scores
        expected |= grpo_advantages(rollouts, scores)
    trained = {}
    for update in made:
        for (uid, session), advantages, mask in zip(
            update.keys, update.rows["advantages"], update.rows["response_mask"], strict=True
        ):
            if mask.any():
                (trained[f"{uid}_{session}_0"],) = set(advantages[mask.bool()].tolist())
    assert trained == pytest.approx(expected, rel=1e-6, abs=1e-6)  # sums over a group, in any order


def own_scores(rollouts: list[dict[str, Any]]) -> dict[str, float]:
    """What :class:`tests.verl.rewards.Mixed` says of each response, as the float32 that verl trains with."""
    scores = dict.fromkeys((row["uid"] for row in rollouts), 0.0)
    for group in groups(rollouts).values():
        scored = {row["uid"]: n % 100 / 100 for row in group if (n := rewards.number(row["output"])) % 7 > 1}
        halved = rewards.halve_all_but_the_best(list(scored.values())) if scored else []
        scores |= dict(zip(scored, map(float, np.float32(halved)), strict=True))
    return scores


def grpo_advantages(rollouts: list[dict[str, Any]], scores: dict[str, float]) -> dict[str, float]:
    """The advantages by verl's own function."""
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    trained = advantages_by_uid(rollouts).keys()
    uids = [row["uid"] for row in rollouts if row["uid"] in trained]
    rows = torch.tensor([[scores[uid]] for uid in uids])
    index = np.array([uid.rsplit("_", 2)[0] for uid in uids], dtype=object)
    advantages, _ = compute_grpo_outcome_advantage(rows, torch.ones_like(rows), index)
    return dict(zip(uids, advantages[:, 0].tolist(), strict=True))


@pytest.fixture(scope="module")
def harried_run(
    tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path, tiny_discriminative_model: Path
) -> Run:
    """A reward model. Its server is killed, then the reward worker, and after three steps there is Ctrl-C."""
    return train(
        tmp_path_factory.mktemp("harried"),
        tiny_generative_model,
        "trainer.total_training_steps=1000",
        "trainer.val_before_train=False",
        "reward_model.enable=True",
        f"reward_model.model.path={tiny_discriminative_model}",
        f"+custom_reward_function.reward_kwargs.model={tiny_discriminative_model}",
        function="judged",
        own_ray=True,
        returncode=130,
    )


def test_killed_servers_and_workers_lose_nothing(harried_run: Run) -> None:
    assert (harried_run.directory / "killed-server").exists()
    assert (harried_run.directory / "killed-worker").exists()
    for step in (1, 2, 3):
        assert harried_run.steps[step]["reward_loop/scored"] == 8 * 4
        assert harried_run.steps[step]["reward_loop/failed"] == 0
    seen = signature([row for step in (1, 2, 3) for row in harried_run.rollouts(step)])
    assert not seen - signature(harried_run.calls), "a rollout has a score that the function did not return"


def test_ctrl_c_leaves_no_process(harried_run: Run, tiny_discriminative_model: Path) -> None:
    assert harried_run.returncode == 130, harried_run.output[-5000:]
    assert any("Interrupted" in line for line in harried_run.output.strip().splitlines()[-5:])
    assert rewards.processes_left("reward_loop.router", str(tiny_discriminative_model)) == []
