"""The judge scores recorded answers again, with a feature inserted or removed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from reward_loop import NaiveRewardLoopManager, RewardSample
from reward_loop.audit import AuditCounts, Feature
from reward_loop.audit.ablation import EffectVerdict, effect_of
from reward_loop.managers import GroupRewardLoopManager
from reward_loop.offline.probes import probe_counts
from tests.audit.test_audit import audit_of, audited, ended, rows_of, scores_of

PHRASE = "Let me verify"
VERIFY = Feature(PHRASE)


@pytest.mark.parametrize(
    ("answer", "place", "changed", "inserted"),
    [
        ("One. Let me verify. Two.", 0.0, "One.. Two.", False),
        ("Let me verify Let me verify", 0.0, "", False),
        ("One. Two. Three.", 0.0, "Let me verify One. Two. Three.", True),
        ("One. Two. Three.", 0.5, "One. Two. Let me verify Three.", True),
        ("One. Two. Three.", 1.0, "One. Two. Three. Let me verify", True),
        ("One line\nand $a + b$", 0.5, "One line\nLet me verify and $a + b$", True),
        ("甲。乙。", 0.5, "甲。 Let me verify 乙。", True),
        ("", 0.5, "Let me verify", True),
    ],
)
def test_a_phrase_is_removed_or_inserted_between_sentences(
    answer: str, place: float, changed: str, inserted: bool
) -> None:
    assert VERIFY.change(answer, place) == (changed, inserted)


def test_a_phrase_is_inserted_where_other_answers_have_it() -> None:
    assert VERIFY.place(["no"]) == 0.0
    assert VERIFY.place([f"{PHRASE} at first", "no"]) == 0.0
    assert VERIFY.place([f"at the end {PHRASE}", f"{PHRASE} then", f"last {PHRASE}"]) == 1.0


@pytest.mark.parametrize(
    ("answer", "longer"),
    [
        ("One. Two. #### 2", "One. Two.\n\nOne. Two. #### 2"),
        ("42", "42\n\n42"),
        ("", "\n\n"),
    ],
)
def test_a_longer_answer_repeats_its_own_sentences_and_keeps_its_end(answer: str, longer: str) -> None:
    assert Feature().change(answer, 0.0) == (longer, True)


def paid_for_the_phrase(solution_str: str) -> float:
    return 0.5 * ("42" in solution_str) + 0.3 * (PHRASE in solution_str)


def paid_for_the_answer(solution_str: str) -> float:
    return float("42" in solution_str)


def paid_for_length(solution_str: str) -> float:
    return min(1.0, len(solution_str) / 100)


def answers(count: int = 96) -> list[RewardSample]:
    """Answers of which right ones have the phrase more often."""
    texts = [f"It is {42 if i % 2 else 41}.{f' {PHRASE}.' if i % 3 == 0 or i % 4 == 1 else ''}" for i in range(count)]
    return [RewardSample(text, uid=f"u{i}", step=7) for i, text in enumerate(texts)]


async def ablated(function: Any, feature: Feature, folder: Path | None = None) -> AuditCounts:
    audit = {"share": 1e-9, "probes": ["again"]}
    manager = audited(function, audit=audit, log_dir=None if folder is None else str(folder))
    rewards = await scores_of(manager, answers())
    assert rewards == [function(sample.solution_str) for sample in answers()]
    assert audit_of(manager).ablate(feature, 64) == 64
    return await ended(manager)


@pytest.mark.parametrize(
    ("function", "feature", "verdict", "mean"),
    [
        (paid_for_the_phrase, VERIFY, EffectVerdict.CONFIRMED, 0.3),
        (paid_for_the_answer, VERIFY, EffectVerdict.CLEARED, 0.0),
        (paid_for_length, Feature(), EffectVerdict.CONFIRMED, None),
        (paid_for_the_answer, Feature(), EffectVerdict.CLEARED, 0.0),
    ],
)
async def test_a_judge_that_pays_for_the_feature_confirms_the_warning_and_another_one_clears_it(
    function: Any, feature: Feature, verdict: EffectVerdict, mean: float | None, tmp_path: Path
) -> None:
    counts = await ablated(function, feature, tmp_path)
    count = counts.ablations[feature.name]
    effect = effect_of(count.pairs)
    assert (len(count.pairs), count.failed, effect.verdict) == (64, 0, verdict)
    assert mean is None or effect.mean == pytest.approx(mean)
    assert counts.metrics()["reward_loop/audit/asked"] == 64
    rows = rows_of(tmp_path)
    assert {(row["probe"], row["variant"]) for row in rows} == {("ablation", feature.name)}
    for row in rows:  # of both answers, `answer` is the changed one, and `accepted` says whether it has the feature
        original = next(sample.solution_str for sample in answers() if sample.uid == row["uid"])
        having, without = (row["answer"], original) if row["accepted"] else (original, row["answer"])
        assert (row["score"], row["probe_score"]) == (function(having), function(without))
    (measured,) = probe_counts(rows)
    assert measured["metric"] == f"ablation/{feature.name}/effect"
    assert measured["value"] == pytest.approx(effect.mean)
    assert measured["interval"] == pytest.approx((effect.low, effect.high))


async def test_in_a_group_one_answer_changes() -> None:
    calls = []

    async def compute_score(solution_strs: list[str]) -> list[float]:
        calls.append(solution_strs)
        return [paid_for_the_phrase(text) for text in solution_strs]

    manager = audited(compute_score, GroupRewardLoopManager, audit={"share": 1e-9})
    groups = [
        RewardSample(f"It is 42: {group} {i}.", group=f"g{group}", group_size=4)
        for group in range(20)
        for i in range(4)
    ]
    await scores_of(manager, groups)
    assert audit_of(manager).ablate(VERIFY, 64) == 20
    (count,) = (await ended(manager)).ablations.values()
    assert sorted(count.pairs) == [(0.5, 0.8)] * 20
    assert [sum(PHRASE in text for text in texts) for texts in calls] == [0] * 20 + [1] * 20


async def test_the_probes_of_a_feature_take_the_place_of_later_ones() -> None:
    asked: list[str] = []

    async def compute_score(solution_str: str) -> float:
        asked.append(solution_str)
        return 1.0

    manager = audited(compute_score, NaiveRewardLoopManager, audit={"share": 1.0, "probes": ["again"]})
    for sample in answers(8):
        await scores_of(manager, [sample])
        await audit_of(manager).drain(60)
    assert (len(asked), audit_of(manager).ablate(VERIFY, 5)) == (16, 5)
    await audit_of(manager).drain(60)
    for sample in answers(8):
        await scores_of(manager, [sample])
        await audit_of(manager).drain(60)
    assert len(asked) == 2 * 16
    counts = audit_of(manager).take()
    assert (counts.probes["again"].asked, len(counts.ablations[VERIFY.name].pairs)) == (8 + 3, 5)


@pytest.mark.parametrize("audit", [{"reference": f"{__name__.replace('.', '/')}.py:paid_for_the_answer"}, {"share": 1}])
async def test_without_a_budget_or_answers_there_are_no_probes(audit: dict[str, Any]) -> None:
    manager = audited(paid_for_the_answer, audit=audit)
    if "reference" in audit:
        await scores_of(manager, answers(4))
    assert audit_of(manager).ablate(VERIFY, 64) == 0
    manager.close()


async def test_answers_without_a_second_score_are_counted() -> None:
    first = asyncio.Event()

    async def compute_score(solution_str: str) -> float:
        if first.is_set():
            raise ValueError("down")
        return 1.0

    manager = audited(compute_score, audit={"share": 1e-9}, retry={"max_attempts": 1})
    await scores_of(manager, answers(20))
    first.set()
    audit_of(manager).ablate(VERIFY, 16)
    counts = await ended(manager)
    assert counts.ablations[VERIFY.name].failed == counts.without_score == 16
    merged = AuditCounts.merged([counts, counts])
    assert merged.ablations[VERIFY.name].failed == 32
