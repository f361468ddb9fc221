"""`AuditCounts` goes from the workers to the trainer."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest

from reward_loop.audit import AuditCounts, ReferencePair
from reward_loop.audit.counts import MAX_SAMPLES


def counts() -> AuditCounts:
    found = AuditCounts(without_score=1, skipped=2)
    for number in range(4):
        found.add("canary/empty", f"c{number}", accepted=number == 0)
        found.add("again", f"a{number}", accepted=number != 0, difference=float(number == 0))
    found.pairs = [
        ReferencePair("a", 1.0, 0.5, {"clear": (1.0, 0.25), "short": (0.5, 0.5)}),
        ReferencePair("b", 1.0, 1.0, {"clear": (0.75, 0.5)}),
    ]
    found.labels = Counter({(True, True): 3, (False, False): 3, (False, True): 2})
    found.drifts = [0.0, 1.0]
    return found


def test_the_metrics_are_shares_of_the_probes_with_a_score() -> None:
    assert counts().metrics() == {
        "reward_loop/audit/asked": 10,
        "reward_loop/audit/without_score": 1,
        "reward_loop/audit/skipped": 2,
        "reward_loop/audit/canary/empty/accepted": 0.25,
        "reward_loop/audit/again/agreement": 0.75,
        "reward_loop/audit/again/difference": 0.25,
        "reward_loop/audit/labelled/accuracy": 0.75,
        "reward_loop/audit/labelled/kappa": pytest.approx(9 / 17),
        "reward_loop/audit/labelled/drift": 0.5,
        "reward_loop/audit/reference/gap": 0.25,
        "reward_loop/audit/reference/gap_error": pytest.approx(0.49, abs=1e-3),
        "reward_loop/audit/reference/clear/gap": 0.5,
        "reward_loop/audit/reference/clear/gap_error": pytest.approx(0.49, abs=1e-3),
        "reward_loop/audit/reference/short/gap": 0.0,
    }


def test_without_probes_there_are_only_zero_counts() -> None:
    assert set(AuditCounts().metrics().values()) == {0.0}


def test_counts_of_workers_add_up() -> None:
    parts = [pickle.loads(pickle.dumps(counts())) for _ in range(3)]
    total = AuditCounts.merged(parts)
    assert (total.probes["again"].asked, total.probes["again"].accepted) == (12, 9)
    assert (total.without_score, total.skipped, len(total.pairs), total.labels.total()) == (3, 6, 6, 24)
    assert total.metrics() == counts().metrics() | {
        "reward_loop/audit/asked": 30,
        "reward_loop/audit/without_score": 3,
        "reward_loop/audit/skipped": 6,
        "reward_loop/audit/reference/gap_error": pytest.approx(0.219, abs=1e-3),
        "reward_loop/audit/reference/clear/gap_error": pytest.approx(0.219, abs=1e-3),
        "reward_loop/audit/reference/short/gap_error": 0.0,
    }


def test_some_samples_are_named_of_accepted_canaries_and_of_scores_that_do_not_agree() -> None:
    found = counts()
    assert found.probes["canary/empty"].samples == ["c0"]
    assert found.probes["again"].samples == ["a0"]
    for _ in range(2 * MAX_SAMPLES):
        found.add("again", "x", accepted=False)
    assert len(found.probes["again"].samples) == MAX_SAMPLES


def test_a_wrong_labelled_answer_is_a_canary_and_is_asked_once() -> None:
    found = AuditCounts()
    for uid, label, accepted in (("a", True, False), ("b", False, True), ("c", False, False), ("d", True, True)):
        found.add_labelled(uid, label, accepted)
    metrics = found.metrics("audit")
    assert metrics["audit/labelled/accuracy"] == metrics["audit/canary/labelled/accepted"] == 0.5
    assert metrics["audit/asked"] == 4
    assert found.probes["canary/labelled"].samples == ["b"]
