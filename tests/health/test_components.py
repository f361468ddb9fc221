"""The monitors of components, with values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reward_loop.health.components import component_saturation, component_share, weights

RNG = np.random.default_rng(0)
QUALITY, FORM = RNG.random(400), (RNG.random(400) < 0.5).astype(float)


def test_weights_are_found_from_the_scores() -> None:
    found = weights(0.9 * QUALITY + 0.1 * FORM + 3.0, {"quality": QUALITY, "form": FORM, "constant": np.ones(400)})
    assert found == {"quality": pytest.approx(0.9), "form": pytest.approx(0.1)}


def test_components_of_very_different_sizes_have_weights() -> None:
    found = weights(0.5 * QUALITY + 0.5 * FORM, {"quality": QUALITY, "form": FORM, "tokens": 1e6 * RNG.random(400)})
    assert found == {"quality": pytest.approx(0.5), "form": pytest.approx(0.5), "tokens": pytest.approx(0, abs=1e-6)}


@pytest.mark.parametrize(
    "components",
    [{"quality": QUALITY}, {"quality": QUALITY, "form": FORM, "other": np.full(400, 2.0)}, {}],
    ids=["one", "a product", "none"],
)
def test_a_score_that_is_not_a_sum_of_components_has_no_weights(components: dict[str, np.ndarray]) -> None:
    assert weights(QUALITY * FORM, components) == {}


def test_the_share_of_a_component_is_its_share_of_the_variance() -> None:
    shares = component_share(0.9 * QUALITY + 0.1 * FORM, {"quality": QUALITY, "form": FORM})
    expected = np.var(0.9 * QUALITY) / (np.var(0.9 * QUALITY) + np.var(0.1 * FORM))
    assert shares["quality"] == pytest.approx(expected)
    assert sum(shares.values()) == pytest.approx(1)


def test_samples_without_a_score_do_not_count() -> None:
    missing = np.arange(400) < 40
    scores = np.where(missing, math.nan, 0.5 * QUALITY + 0.5 * FORM)
    components = {"quality": np.where(missing, math.nan, QUALITY), "form": np.where(missing, math.nan, FORM)}
    assert component_share(scores, components).keys() == {"quality", "form"}
    assert component_share(np.full(400, math.nan), components) == {}


def test_saturation_counts_samples_at_the_top_of_the_range() -> None:
    values = np.array([0.0, 0.995, 1.0, 0.98, math.nan])
    assert component_saturation({"quality": values}, {"quality": (0.0, 1.0)}) == {"quality": 0.5}
    assert component_saturation({"quality": values}, {"quality": (0.0, 2.0)}) == {"quality": 0.0}


def test_a_component_that_never_varied_is_not_saturated() -> None:
    assert component_saturation({"constant": np.ones(4)}, {"constant": (1.0, 1.0)}) == {}
