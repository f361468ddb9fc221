"""Masked rows leave the loss, its denominator and the optimizer, in verl's own engines and losses on a tiny model."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from examples.tiny_models import build_tiny_model
from tests.verl import engines
from tests.verl.engines import AGGREGATIONS, CASES, LENGTHS, MASKED, POLICY_LOSSES
from tests.verl.minibatches import Update, updates
from tests.verl.recompute import difference, gradient, learnt, norm, value_gradient

pytestmark = pytest.mark.integration

RANKS = (1, 2)
ON_ONE_RANK = [name for name in CASES if name.startswith("policy-loss")]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("policy"), "generative", hidden_size=16, layers=1)


@pytest.fixture(scope="module")
def results(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The records of all cases, by the number of ranks."""
    directories = {ranks: tmp_path_factory.mktemp(f"ranks-{ranks}") for ranks in RANKS}
    engines.run(policy, directories[1], 1)
    engines.run(policy, directories[2], 2, [name for name in CASES if name not in ON_ONE_RANK])
    return directories


def recorded(directory: Path, name: str) -> list[Update]:
    return updates(directory / name, "value_model" if CASES[name].critic else "language_model")


def metrics(directory: Path, name: str) -> dict[str, list[float]]:
    return json.loads((directory / name / "metrics.json").read_text())


def longest(update: Update, ranks: int) -> list[float]:
    """For each row that is not masked, the longest response of its micro-batch's rows that are not masked."""
    rows, lengths = learnt(update), [len(response) for response in update.rows["responses"]]
    size = CASES["actor-token-mean"].micro_batch
    return [float(max(lengths[other] for other in rows if other // size == row // size)) for row in rows]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("model", ["actor", "critic"])
def test_the_gradient_is_that_of_the_unmasked_rows_alone(
    results: dict[int, Path], policy: Path, model: str, aggregation: str, ranks: int
) -> None:
    (update,) = recorded(results[ranks], f"{model}-{aggregation}")
    assert update.ranks == ranks
    assert len(learnt(update)) == len(LENGTHS) - len(MASKED)
    options = AGGREGATIONS[aggregation]
    scale = options.get("loss_scale_factor") or longest(update, ranks)
    by_hand = gradient if model == "actor" else value_gradient
    expected = by_hand(policy, update, options["loss_agg_mode"], scale=scale)
    assert norm(expected) > 1e-3
    assert difference(expected, update.gradient) < 1e-4


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_policy_loss_is_as_if_the_masked_rows_did_not_exist(results: dict[int, Path], loss: str) -> None:
    (masked,) = recorded(results[1], f"policy-loss-{loss}")
    (alone,) = recorded(results[1], f"policy-loss-{loss}-alone")
    assert norm(alone.gradient) > 1e-3
    assert difference(alone.gradient, masked.gradient) < 1e-4
    ours, theirs = metrics(results[1], f"policy-loss-{loss}"), metrics(results[1], f"policy-loss-{loss}-alone")
    assert ours["actor/pg_loss"] == pytest.approx(theirs["actor/pg_loss"])


def test_without_masked_rows_the_update_is_that_of_verl(results: dict[int, Path], policy: Path) -> None:
    (update,) = recorded(results[1], "actor-unmasked")
    assert update.global_batch_size == len(LENGTHS)
    assert difference(gradient(policy, update), update.gradient) < 1e-4


@pytest.mark.parametrize("ranks", RANKS)
def test_a_micro_batch_that_is_masked_as_a_whole_adds_nothing(
    results: dict[int, Path], policy: Path, ranks: int
) -> None:
    (update,) = recorded(results[ranks], "actor-masked-micro-batch")
    assert difference(gradient(policy, update, "seq-mean-token-mean"), update.gradient) < 1e-4


def test_rows_that_verls_rejection_sampling_rejects_stay_in_the_denominator_as_in_verl(
    results: dict[int, Path], policy: Path
) -> None:
    (update,) = recorded(results[1], "actor-rejected")
    rows = len(LENGTHS) - len(MASKED)
    assert update.global_batch_size == rows
    expected = gradient(policy, update, "seq-mean-token-mean")
    shrunk = {name: tensor * (rows - 1) / rows for name, tensor in expected.items()}
    assert difference(shrunk, update.gradient) < 1e-4


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", ["actor", "critic"])
@pytest.mark.parametrize(("place", "steps"), [("first", 1), ("middle", 2), ("last", 2), ("everywhere", 0)])
def test_a_mini_batch_whose_rows_are_all_masked_makes_no_optimizer_step(
    results: dict[int, Path], model: str, place: str, steps: int, ranks: int
) -> None:
    name = f"{model}-masked-{place}"
    made = recorded(results[ranks], name)
    assert len(made) == steps
    for earlier, later in pairwise(made):
        # AdamW's momentum moves weights, whatever the gradient: nothing happened in between.
        assert all(later.before[weight].equal(earlier.after[weight]) for weight in later.before)
    for update in made:
        assert learnt(update)
        assert any(not update.after[weight].equal(update.before[weight]) for weight in update.before)
    logged = metrics(results[ranks], name)
    skipped = len(CASES[name].masked) - steps
    assert sum(logged["skipped_share"]) == skipped
    assert len(logged["skipped_share"]) == len(CASES[name].masked)
    # verl moves the learning-rate schedule on once in a call.
    assert len(logged["lr"]) == 1
    assert not [key for key, values in logged.items() if not all(map(math.isfinite, values))]
    assert len(logged.get("loss", [])) == steps
    assert logged["mfu"]


def test_a_mini_batch_whose_rows_are_all_rejected_makes_no_optimizer_step(results: dict[int, Path]) -> None:
    assert len(recorded(results[1], "actor-all-rejected")) == 1
    assert metrics(results[1], "actor-all-rejected")["skipped_share"] == [1.0, 0.0]
