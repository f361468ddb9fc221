"""The results of the probes of a judge in a records folder."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from reward_loop._util.intervals import kappa
from reward_loop.offline.probes import probe_counts


def row(probe: str, score: float, probed: float | None, accepted: bool | None = None, **fields: Any) -> dict[str, Any]:
    return {"probe": probe, "variant": "", "score": score, "probe_score": probed, "accepted": accepted, **fields}


def results(*rows: dict[str, Any]) -> dict[str, tuple[int, float, Any]]:
    return {one["metric"]: (one["counted"], one["value"], one["interval"]) for one in probe_counts(rows)}


def test_labelled_answers_have_kappa_and_the_drift_since_the_first_time() -> None:
    # The rows of several processes are not in the order of their times.
    scores = {2.0: (1.0, 0.5, 0.75), 1.0: (0.75, 0.0, 0.25), 3.0: (0.75, 0.0, None)}
    rows = [
        row("labelled", float(label), score, None if score is None else score > 0.5, uid=uid, time=time)
        for time, of_time in scores.items()
        for (uid, label), score in zip({"a": True, "b": False, "c": False}.items(), of_time, strict=True)
    ]
    found = results(*rows)
    assert found["labelled/accuracy"][:2] == (8, 7 / 8)
    # Three labels and four verdicts of eight are true: 1/2 is expected by chance.
    assert found["labelled/kappa"] == (8, pytest.approx((7 / 8 - 1 / 2) / (1 - 1 / 2)), None)
    assert found["labelled/drift"] == (5, pytest.approx((0.25 + 0.5 + 0.5 + 0.0 + 0.0) / 5), None)


def test_after_the_first_time_there_is_no_drift_yet() -> None:
    assert set(results(row("labelled", 1.0, 1.0, True, uid="a"))) == {"labelled/accuracy", "labelled/kappa"}
    assert set(results(row("labelled", 1.0, None, uid="a"))) == {"labelled/accuracy"}


def test_the_reference_judge_has_a_gap_with_its_interval_for_each_component_of_both() -> None:
    found = results(
        row("reference", 1.0, 0.5, components={"clear": [1.0, 0.25], "short": [0.5, 0.5]}),
        row("reference", 1.0, 1.0, components={"clear": [0.75, 0.5]}),
        row("reference", 1.0, None, components={}),
        row("reference", 1.0, 0.75),  # of an earlier version
    )
    assert {metric: one[:2] for metric, one in found.items()} == {
        "reference/gap": (3, 0.25),
        "reference/clear/gap": (2, 0.5),
        "reference/short/gap": (1, 0.0),
    }
    assert found["reference/clear/gap"][2] == pytest.approx((0.01, 0.99))
    assert found["reference/short/gap"][2] is None


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({(True, True): 5, (False, False): 5}, 1.0),
        ({(True, True): 5, (True, False): 5, (False, True): 5, (False, False): 5}, 0.0),
        ({(True, False): 5, (False, True): 5}, -1.0),
        ({(True, True): 5}, 0.0),
        # Cohen (1960) corrects for chance: 85 % agreement, of which 50 % are expected.
        ({(True, True): 40, (True, False): 10, (False, True): 5, (False, False): 45}, 0.7),
    ],
)
def test_kappa_is_the_agreement_beyond_chance(labels: dict[tuple[bool, bool], int], expected: float) -> None:
    assert kappa(Counter(labels)) == pytest.approx(expected)
