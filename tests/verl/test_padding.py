"""Padding adds nothing to a gradient, in verl's own training workers, engines and losses on a tiny model.

The trainer sets ``global_batch_size`` to the rows that are not padding; see `tests.verl.test_updates` for that.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.tiny_models import build_tiny_model
from tests.verl import engines
from tests.verl.engines import AGGREGATIONS, CASES, LENGTHS, PADDING, POLICY_LOSSES
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


def longest(update: Update) -> list[float]:
    """For each row that is not padding, the longest response of its micro-batch."""
    rows, lengths = learnt(update), [len(response) for response in update.rows["responses"]]
    size = CASES["actor-token-mean"].micro_batch
    return [float(max(lengths[row // size * size : (row // size + 1) * size])) for row in rows]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("model", ["actor", "critic"])
def test_the_gradient_is_that_of_the_rows_that_are_not_padding(
    results: dict[int, Path], policy: Path, model: str, aggregation: str, ranks: int
) -> None:
    (update,) = recorded(results[ranks], f"{model}-{aggregation}")
    assert update.ranks == ranks
    assert len(learnt(update)) == len(LENGTHS) - len(PADDING)
    options = AGGREGATIONS[aggregation]
    scale = options.get("loss_scale_factor") or longest(update)
    by_hand = gradient if model == "actor" else value_gradient
    expected = by_hand(policy, update, options["loss_agg_mode"], scale=scale)
    assert norm(expected) > 1e-3
    assert difference(expected, update.gradient) < 1e-4


@pytest.mark.parametrize("loss", [loss for loss in POLICY_LOSSES if loss != "geo_mean"])
def test_every_policy_loss_is_as_if_the_padding_did_not_exist(results: dict[int, Path], loss: str) -> None:
    (padded,) = recorded(results[1], f"policy-loss-{loss}")
    (alone,) = recorded(results[1], f"policy-loss-{loss}-alone")
    assert norm(alone.gradient) > 1e-3
    assert difference(alone.gradient, padded.gradient) < 1e-4
    ours, theirs = metrics(results[1], f"policy-loss-{loss}"), metrics(results[1], f"policy-loss-{loss}-alone")
    assert ours["actor/pg_loss"] == pytest.approx(theirs["actor/pg_loss"], rel=1e-5)


def test_verls_loss_geo_mean_divides_by_all_rows_of_a_micro_batch(results: dict[int, Path]) -> None:
    (padded,) = recorded(results[1], "policy-loss-geo_mean")
    (alone,) = recorded(results[1], "policy-loss-geo_mean-alone")
    share = len(PADDING) / len(LENGTHS)
    assert difference(alone.gradient, padded.gradient) == pytest.approx(share, rel=1e-4)
