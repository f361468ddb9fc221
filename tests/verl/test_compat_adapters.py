"""verl's functions with the interface of its newest release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from verl.trainer.ppo.v1 import PPOTrainerSync

from reward_loop.verl.compat.adapters import with_missing_values

pytestmark = pytest.mark.integration  # imports verl

SOURCES = ["maths"] * 6 + ["chess"] * 2
UIDS = ["a", "a", "a", "b", "b", "b", "c", "c"]
COLUMNS: dict[str, list[Any]] = {
    "reward": [0.5, None, 1.0, 0.0, 0.25, 0.75, 1.0, 0.0],
    "acc": [1.0, None, 0.0, 0.0, None, None, None, None],
    "judge": [None, None, 0.5, None, None, None, 0.25, None],
    "nothing": [None] * 8,
}
TURNS = [1, 2, 3, 4, 1, 2, 3, 4]


def verls() -> Any:
    trainer: Any = object.__new__(PPOTrainerSync)
    return trainer._val_metrics_update


def as_in_0_9_0(
    data_sources: Sequence[str], uids: Sequence[str], columns: dict[str, list[Any]], turns: Sequence[int]
) -> dict[str, float]:
    """verl's function, without the argument that 0.9.0 lacks. It fails on missing values, as that of 0.9.0 does."""
    assert not any(value is None for column in columns.values() for value in column)
    return verls()(data_sources, uids, columns, turns)


@pytest.mark.parametrize("predictions", [["x", "y", "x", "y", "y", "x", "x", "y"], None])
def test_missing_values_are_left_out_with_verl_0_9_0_as_with_later_ones(predictions: list[str] | None) -> None:
    columns = COLUMNS | ({} if predictions is None else {"pred": predictions})
    metrics = with_missing_values(as_in_0_9_0)(SOURCES, UIDS, columns, TURNS, expected_acc_counts={("maths", "a"): 4})
    expected = {
        "val-aux/maths/reward/mean@3": 1 / 3,  # of b
        "val-aux/maths/reward/mean@2": 0.75,  # of a
        "val-core/chess/reward/mean@2": 0.5,
        "val-core/maths/acc/mean@2": 0.5,
        "val-aux/maths/acc/mean@1": 0.0,
        "val-aux/maths/judge/mean@1": 0.5,
        "val-aux/num_turns/mean": 2.5,
    }
    assert {name: metrics.get(name) for name in expected} == pytest.approx(expected)
    assert not [name for name in metrics if "nothing" in name]
    assert any("maj@" in name for name in metrics) is (predictions is not None)
    installed = verls()
    if with_missing_values(installed) is installed:  # verl 0.9.1 or later
        # There, a prompt has majority votes only if none of its samples lacks a value.
        later = {name: value for name, value in installed(SOURCES, UIDS, columns, TURNS).items() if "maj@" not in name}
        assert {name: value for name, value in metrics.items() if "maj@" not in name} == pytest.approx(later)


def test_a_sample_without_a_prediction_leaves_out_the_majority_votes_of_its_columns() -> None:
    columns = {"reward": [1.0, 0.0, 1.0, 1.0], "acc": [1.0, None, 1.0, 1.0], "pred": ["x", None, "x", "y"]}
    metrics = with_missing_values(as_in_0_9_0)(["s"] * 4, ["p"] * 4, columns, ())
    assert not [name for name in metrics if "reward/maj@" in name]
    assert [name for name in metrics if "acc/maj@" in name]
