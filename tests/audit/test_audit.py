"""`Audit` makes probes beside the samples of a manager."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardLoopManagerBase, RewardSample
from reward_loop.agent import RewardAgent
from reward_loop.audit import Audit, AuditCounts, ProbeCount, ReferencePair, audit, open_audit
from reward_loop.audit.monitors import HealthWatch
from reward_loop.audit.probes import FRAME
from reward_loop.audit.values import Observation
from reward_loop.config import AuditConfig, HealthConfig
from reward_loop.errors import ConfigError
from reward_loop.managers import BatchRewardLoopManager, CompositeRewardLoopManager, GroupRewardLoopManager
from reward_loop.records import records
from reward_loop.types import RewardResult

AGAIN = {"share": 1.0, "probes": ["again"]}


def audited(
    function: Any, cls: type[RewardLoopManagerBase] = NaiveRewardLoopManager, **options: Any
) -> RewardLoopManagerBase:
    manager = cls(RewardLoopConfig(**{"audit": AGAIN} | options), compute_score=function)
    open_audit(manager)
    return manager


def audit_of(manager: RewardLoopManagerBase) -> Audit:
    assert isinstance(manager.observer, Audit)
    return manager.observer


async def ended(manager: RewardLoopManagerBase) -> AuditCounts:
    """Wait for the probes, and return their counts."""
    await audit_of(manager).drain(60)
    return audit_of(manager).take()


async def scores_of(manager: RewardLoopManagerBase, samples: Sequence[RewardSample]) -> list[float]:
    rewards = await asyncio.gather(*map(manager.run_single, samples))
    return [reward["reward_score"] for reward in rewards]


def group_of(size: int, name: str = "g") -> list[RewardSample]:
    return [
        RewardSample(f"answer {i}", uid=f"{name}{i}", group=name, group_size=size, prompt=f"question {name}")
        for i in range(size)
    ]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    records(folder / "audit").flush()
    return [json.loads(line) for path in (folder / "audit").glob("*.jsonl") for line in path.read_text().splitlines()]


# --- The same answer again


@pytest.mark.parametrize(("tolerance", "agreed"), [(0.0, 0), (0.5, 1), (0.4, 0)])
async def test_scores_agree_within_the_tolerance(tolerance: float, agreed: int) -> None:
    scores = iter([1.0, 1.5])
    manager = audited(lambda solution_str: next(scores), audit={**AGAIN, "tolerance": tolerance})
    await manager.run_single(RewardSample("a", uid="u"))
    count = (await ended(manager)).probes["again"]
    assert (count.asked, count.accepted, count.difference) == (1, agreed, 0.5)
    assert count.samples == ([] if agreed else ["u"])
    assert not (await ended(manager)).probes


async def test_a_frame_goes_in_front_of_the_answer() -> None:
    asked = []

    async def compute_score(solution_str: str) -> float:
        asked.append(solution_str)
        return 1.0

    manager = audited(compute_score, audit={"share": 1.0, "probes": ["frame"]})
    await manager.run_single(RewardSample("4"))
    assert (await ended(manager)).probes["frame"].accepted == 1
    assert asked == ["4", FRAME + "4"]


# --- Canaries


@pytest.mark.parametrize(
    ("first", "canary", "accept", "expected"),
    [
        ([0.0, 1.0, 1.0], 1.0, None, True),
        ([0.0, 1.0, 1.0], 0.0, None, False),
        ([0.0, 0.0, 1.0], 0.0, None, False),
        ([0.0, 0.0, 1.0], 0.6, None, True),
        ([0.1, 0.15, 0.2, 0.9], 0.2, None, False),  # most answers are wrong
        ([0.1, 0.8, 0.9, 0.95], 0.7, None, True),  # most answers are right
        ([0.1, 0.15, 0.2, 0.9], 0.05, None, False),
        ([-9.0, *[0.0, 1.0] * 10], 0.0, None, False),  # one answer has a penalty
        ([0.0, *[1.0] * 30], 1.0, None, True),  # almost all answers are right
        ([1.0, *[0.0] * 30], 0.0, None, False),
        ([0.0, 0.0, 0.0], 0.0, None, None),  # the judge gives this score to everything
        ([0.0, 0.0, 0.0], 0.5, None, True),
        ([1.0, 1.0, 1.0], 0.0, None, False),
        ([0.0, 0.0, 0.0], 0.0, 0.0, True),
        ([0.0, 1.0, 1.0], 0.9, 0.95, False),
    ],
)
async def test_a_canary_is_accepted_in_the_upper_half_of_the_scores(
    tmp_path: Path, first: list[float], canary: float, accept: float | None, expected: bool | None
) -> None:
    async def compute_score(solution_str: str) -> float:
        return canary if solution_str in AuditConfig().keys else float(solution_str)

    options = {"share": 1e-9, "probes": ["master_key"], "accept": accept}
    manager = audited(compute_score, audit=options, log_dir=str(tmp_path))
    await scores_of(manager, [RewardSample(str(score)) for score in first[:-1]])
    audit_of(manager)._options = audit_of(manager)._options.model_copy(update={"share": 1.0})
    await manager.run_single(RewardSample(str(first[-1]), uid="u"))
    counts = await ended(manager)
    count = counts.probes.get("canary/master_key")
    assert (None if count is None else bool(count.accepted)) == expected
    assert [row["accepted"] for row in rows_of(tmp_path)] == [expected]


async def test_each_canary_is_scored_in_place_of_the_answer_with_the_rest_of_the_sample() -> None:
    asked = defaultdict(list)

    async def compute_score(solution_str: str, ground_truth: str) -> float:
        asked[ground_truth].append(solution_str)
        return float(solution_str == f"The answer is {ground_truth}")

    manager = audited(compute_score, audit={"share": 1.0})
    for number in range(40):
        truth = str(number)
        sample = RewardSample(f"The answer is {truth}", ground_truth=truth, prompt=f"question {truth}")
        assert (await scores_of(manager, [sample])) == [1.0]
    counts = await ended(manager)
    assert {kind for kind in counts.probes if kind.startswith("canary/")} == {
        f"canary/{kind}" for kind in ("master_key", "empty", "other_answer", "cut_off", "question")
    }
    assert sum(count.accepted for kind, count in counts.probes.items() if kind.startswith("canary/")) == 0
    assert counts.probes["again"].asked == counts.probes["again"].accepted >= 5
    assert all(texts[0] == f"The answer is {truth}" and len(texts) <= 2 for truth, texts in asked.items())


# --- Rewards do not depend on probes


CACHE = {"cache": {"enabled": True}}
LIMITS = {"limits": {"default": {"max_concurrent": 2}}}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *itertools.product(["naive", "batch", "group", "composite"], [{}, LIMITS]),
        *itertools.product(["naive", "composite"], [CACHE]),  # batched functions are not cached
    ],
)
async def test_rewards_have_the_same_bits_with_and_without_probes(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    def score(text: str) -> float:
        return sum(map(ord, text)) / 7919 + len(text) / 3

    async def one(solution_str: str) -> float:
        await asyncio.sleep(0)
        return score(solution_str)

    async def many(solution_strs: list[str]) -> list[float]:
        await asyncio.sleep(0)
        # A comparison: each score depends on all answers of the call, and on their order.
        return [
            score(text) + (sum(i * score(other) for i, other in enumerate(solution_strs)) if kind == "group" else 0.0)
            for text in solution_strs
        ]

    cls = {
        "naive": NaiveRewardLoopManager,
        "batch": BatchRewardLoopManager,
        "group": GroupRewardLoopManager,
        "composite": CompositeRewardLoopManager,
    }[kind]
    if kind == "composite":
        options = {**options, "components": {"a": {"weight": 0.3}, "b": {"weight": 0.1}}}
    samples = [sample for name in "abcdefgh" for sample in group_of(4, name)]
    function = many if kind in ("batch", "group") else one
    (tmp_path / "other.py").write_text("async def judge(solution_str):\n    return 0.5\n")
    probes = {"share": 1.0, "reference": f"{tmp_path}/other.py:judge", "reference_share": 1.0}
    plain = audited(function, cls, audit={}, **options)
    probed = audited(function, cls, audit=probes, **options)
    expected = await scores_of(plain, samples)
    found = await scores_of(probed, samples)
    counts = await ended(probed)
    assert [score.hex() for score in found] == [score.hex() for score in expected]
    assert sum(count.asked for count in counts.probes.values()) >= 8
    assert len(counts.pairs) == 32 or counts.skipped > 0
    assert plain.observer is None


async def test_a_reward_does_not_wait_for_its_probe() -> None:
    second = asyncio.Event()
    calls = itertools.count()

    async def compute_score(solution_str: str) -> float:
        if next(calls):
            await second.wait()
        return 1.0

    manager = audited(compute_score)
    assert await scores_of(manager, [RewardSample("a")]) == [1.0]
    assert not audit_of(manager).take().probes
    second.set()
    assert (await ended(manager)).probes["again"].accepted == 1


async def test_a_probe_waits_until_no_sample_waits_for_a_limit() -> None:
    order: list[str] = []
    go = asyncio.Semaphore(0)

    async def compute_score(solution_str: str) -> float:
        order.append(solution_str)
        await go.acquire()
        return 1.0

    manager = audited(compute_score, limits={"default": {"max_concurrent": 1}})
    waiting = asyncio.gather(*(manager.run_single(RewardSample(text)) for text in ("a", "b", "c")))
    for _ in range(6):
        go.release()
    await waiting
    await ended(manager)
    assert order == ["a", "b", "c", "a", "b", "c"]


async def test_probes_leave_half_of_the_threads_to_samples() -> None:
    probes_at_once: set[int] = set()
    manager: RewardLoopManagerBase

    def compute_score(solution_str: str) -> float:
        probes_at_once.add(len(audit_of(manager)._running))
        return 1.0

    manager = audited(compute_score, max_threads=4)
    assert await scores_of(manager, [RewardSample(str(number)) for number in range(30)]) == [1.0] * 30
    counts = await ended(manager)
    assert counts.probes["again"].asked + counts.skipped == 30
    assert max(probes_at_once) == 2


async def test_probes_are_neither_counted_as_failures_nor_recorded_as_samples(tmp_path: Path) -> None:
    async def compute_score(solution_str: str) -> float:
        if solution_str == "":
            raise ValueError("no answer")
        return float(len(solution_str))

    options: dict[str, Any] = {"min_samples_for_failed_share": 1, "max_failed_share": 0.0, "log_dir": str(tmp_path)}
    options |= {"audit": {"share": 1.0, "probes": ["empty"]}, "components": {"a": {}}}
    manager = audited(compute_score, CompositeRewardLoopManager, **options)
    for number in range(3):
        await manager.run_single(RewardSample("a" * number + "b", uid=f"u{number}"))
    assert (await ended(manager)).without_score == 3
    await manager.run_single(RewardSample("c", uid="u3"))
    records(tmp_path).flush()
    lines = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert sorted(line["uid"] for line in lines) == ["u0", "u1", "u2", "u3"]


async def test_probes_are_not_cached_and_do_not_use_the_cache(tmp_path: Path) -> None:
    numbers = itertools.count()

    async def compute_score(solution_str: str) -> float:
        return float(next(numbers))

    cache = {"enabled": True, "path": str(tmp_path / "cache"), "version": "1"}
    manager = audited(compute_score, cache=cache)
    assert await scores_of(manager, [RewardSample("a")]) == [0.0]
    assert (await ended(manager)).probes["again"].difference == 1.0
    assert await scores_of(manager, [RewardSample("a")]) == [0.0]


async def test_a_probe_that_a_batched_function_rejects_fails_no_sample() -> None:
    async def compute_score(solution_strs: list[str]) -> list[float]:
        assert all(solution_strs)
        return [1.0 for _ in solution_strs]

    options: dict[str, Any] = {"audit": {"share": 1.0, "probes": ["empty"]}, "batch": {"max_wait_ms": 1}}
    manager = audited(compute_score, BatchRewardLoopManager, **options)
    for _ in range(4):
        assert await scores_of(manager, [RewardSample("a"), RewardSample("b")]) == [1.0, 1.0]
    assert (await ended(manager)).without_score == 8


async def test_a_probe_with_dense_rewards_has_a_score_although_the_length_of_its_answer_is_unknown() -> None:
    async def compute_score(solution_str: str) -> dict[str, Any]:
        return {"score": float(len(solution_str)), "token_level_scores": [1.0] * len(solution_str)}

    manager = audited(compute_score, audit={"share": 1.0, "probes": ["frame"]})
    await manager.run_single(RewardSample("abc", response_length=3))
    assert (await ended(manager)).probes["frame"].difference == len(FRAME)


# --- Groups


async def test_a_group_is_asked_in_the_other_order_and_each_score_is_compared() -> None:
    calls: list[list[str]] = []

    async def compute_score(solution_strs: list[str]) -> list[float]:
        calls.append(solution_strs)
        return [float(place == 0) for place in range(len(solution_strs))]  # the first one always wins

    manager = audited(compute_score, GroupRewardLoopManager, audit={"share": 1.0, "probes": ["order"]})
    samples = group_of(3)
    assert await scores_of(manager, samples) == [1.0, 0.0, 0.0]
    count = (await ended(manager)).probes["order"]
    assert calls == [["answer 0", "answer 1", "answer 2"], ["answer 2", "answer 1", "answer 0"]]
    assert (count.asked, count.accepted, count.samples) == (3, 1, ["g0", "g2"])


async def test_a_canary_takes_the_place_of_one_answer_in_a_copy_of_its_group(tmp_path: Path) -> None:
    calls: list[list[str]] = []

    async def compute_score(solution_strs: list[str]) -> list[float]:
        calls.append(solution_strs)
        return [float(len(text)) for text in solution_strs]

    options: dict[str, Any] = {"audit": {"share": 1.0, "probes": ["empty"]}, "log_dir": str(tmp_path)}
    manager = audited(compute_score, GroupRewardLoopManager, **options)
    await scores_of(manager, group_of(3))
    counts = await ended(manager)
    assert sorted(calls[1]) == ["", *sorted({f"answer {i}" for i in range(3)} & set(calls[1]))]
    assert len(calls[1]) == 3
    assert (counts.probes["canary/empty"].asked, counts.probes["canary/empty"].accepted) == (1, 0)
    (row,) = rows_of(tmp_path)
    assert calls[0][int(row["uid"].removeprefix("g"))] not in calls[1]


async def test_members_of_a_group_without_a_score_are_not_compared() -> None:
    async def compute_score(solution_strs: list[str]) -> list[float | None]:
        return [None if text == "answer 1" else 1.0 for text in solution_strs]

    manager = audited(compute_score, GroupRewardLoopManager)
    await scores_of(manager, group_of(3))
    counts = await ended(manager)
    assert (counts.probes["again"].asked, counts.without_score) == (2, 0)


# --- Which samples


async def test_failed_unscored_and_validation_samples_have_no_probes() -> None:
    async def compute_score(solution_str: str) -> float | None:
        if solution_str == "bad":
            raise ValueError("no")
        return None if solution_str == "none" else 1.0

    manager = audited(compute_score)
    await scores_of(manager, [RewardSample("bad"), RewardSample("none"), RewardSample("good", validate=True)])
    assert await ended(manager) == AuditCounts()


async def test_the_share_of_samples_is_that_of_the_option() -> None:
    async def compute_score(solution_str: str) -> float:
        return 1.0

    manager = audited(compute_score, audit={**AGAIN, "share": 0.25})
    audit_of(manager)._random.seed(1)
    for number in range(200):
        await manager.run_single(RewardSample(str(number)))
        await asyncio.sleep(0)
    assert 30 <= (await ended(manager)).probes["again"].asked <= 70


async def test_probes_beyond_those_that_may_wait_are_skipped_and_counted() -> None:
    release = asyncio.Event()
    seen: set[str] = set()

    async def compute_score(solution_str: str) -> float:
        if solution_str in seen:
            await release.wait()
        seen.add(solution_str)
        return 1.0

    manager = audited(compute_score)
    possible = audit.MAX_RUNNING + audit.MAX_WAITING
    for number in range(possible + 5):
        await manager.run_single(RewardSample(str(number)))
    release.set()
    counts = await ended(manager)
    assert (counts.probes["again"].asked, counts.skipped) == (possible, 5)


# --- Labelled answers and the reference judge


async def test_labelled_answers_are_scored_every_some_steps(tmp_path: Path) -> None:
    lines = [
        {"solution_str": "right", "label": True},
        {"solution_str": "wrong", "label": False, "uid": "w", "prompt": "2 + 2?", "ground_truth": "4"},
        {"solution_str": "empty", "label": False},
    ]
    (tmp_path / "labelled.jsonl").write_text("\n".join(map(json.dumps, lines)))
    scores = {"right": 1.0, "wrong": 0.75, "empty": 0.0, "sample": 0.5}

    async def compute_score(solution_str: str) -> float:
        return scores[solution_str]

    options: dict[str, Any] = {"labelled": str(tmp_path / "labelled.jsonl"), "labelled_every": 5, "accept": 0.5}
    manager = audited(compute_score, audit=options, log_dir=str(tmp_path))
    await manager.run_single(RewardSample("sample", step=1))
    counts = await ended(manager)
    assert counts.labels == {(True, True): 1, (False, True): 1, (False, False): 1}
    assert (counts.probes["labelled"].asked, counts.probes["labelled"].accepted) == (3, 2)
    assert (counts.probes["labelled"].samples, counts.drifts) == (["w"], [])
    await manager.run_single(RewardSample("sample", step=5))
    assert not (await ended(manager)).probes
    scores["right"] = 0.25
    await manager.run_single(RewardSample("sample", step=6))
    counts = await ended(manager)
    assert (counts.probes["labelled"].accepted, sorted(counts.drifts)) == (1, [0.0, 0.0, 0.75])
    rows = [row for row in rows_of(tmp_path) if row["uid"] == "w"]
    assert [(row["probe"], row["step"], row["score"], row["accepted"]) for row in rows] == [
        ("labelled", 1, 0.0, True),
        ("labelled", 6, 0.0, True),
    ]
    # The texts of the file are recorded once.
    assert [(row.get("prompt"), row.get("ground_truth")) for row in rows] == [("2 + 2?", "4"), (None, None)]


async def test_labelled_answers_have_the_arguments_that_are_those_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "labelled.jsonl").write_text('{"solution_str": "1", "label": true}')

    def compute_score(solution_str: str, global_steps: int, training_progress: float, is_truncated: bool) -> float:
        return float((global_steps, training_progress, is_truncated) == (1, 0.1, solution_str == "0"))

    manager = audited(compute_score, audit={"labelled": str(tmp_path / "labelled.jsonl"), "accept": 0.5})
    await manager.run_single(RewardSample("0", step=1, training_progress=0.1, is_truncated=True))
    counts = await ended(manager)
    assert (counts.without_score, counts.probes["labelled"].accepted) == (0, 1)


async def test_labelled_answers_wait_until_the_scores_of_samples_tell_what_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "labelled.jsonl").write_text('{"solution_str": "1", "label": true}')
    asked = []

    async def compute_score(solution_str: str) -> float:
        asked.append(solution_str)
        return float(solution_str)

    manager = audited(compute_score, audit={"labelled": str(tmp_path / "labelled.jsonl")})
    for number in range(audit.MIN_SCORES):
        assert len(asked) == number
        await manager.run_single(RewardSample(str(number % 2)))
        await asyncio.sleep(0)
    counts = await ended(manager)
    assert counts.labels == {(True, True): 1}


def test_a_labelled_answer_that_no_component_scores_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "labelled.jsonl").write_text('{"solution_str": "1", "label": true}')
    with pytest.raises(ConfigError, match=r"audit\.labelled: labelled 1: none of reward_loop\.components scores .* ''"):
        audited(
            lambda solution_str: 1.0,
            CompositeRewardLoopManager,
            audit={"labelled": str(tmp_path / "labelled.jsonl")},
            components={"form": {"data_sources": "math"}},
        )


def test_labelled_answers_need_a_manager_of_single_samples(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"audit\.labelled: the manager scores whole groups"):
        audited(lambda solution_strs: [1.0], GroupRewardLoopManager, audit={"labelled": str(tmp_path)})


async def test_the_reference_judge_scores_the_same_answers(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "async def judge(solution_str, ground_truth, reward_router_address):\n"
        "    assert reward_router_address == '127.0.0.1:1'\n"
        "    right = float(solution_str == ground_truth)\n"
        "    return {'score': right, 'clear': 0.25, 'length': 1, 'reason': 'same'}\n"
    )
    options = RewardLoopConfig(
        audit={"reference": f"{tmp_path}/other.py:judge", "reference_share": 1.0, "accept": 0.5}, log_dir=str(tmp_path)
    )
    manager = NaiveRewardLoopManager(
        options,
        compute_score=lambda solution_str: {"score": 1.0, "clear": 0.75, "form": 1.0, "reason": "good"},
        reward_router_address="127.0.0.1:1",
    )
    open_audit(manager)
    samples = [RewardSample(text, ground_truth="a", uid=text) for text in "ab"]
    await scores_of(manager, samples)
    counts = await ended(manager)
    both = {"clear": (0.75, 0.25)}  # only one judge returned the other numbers
    assert sorted(counts.pairs, key=lambda pair: pair.uid) == [
        ReferencePair("a", 1.0, 1.0, both),
        ReferencePair("b", 1.0, 0.0, both),
    ]
    assert counts.probes == {"canary/reference": ProbeCount(1, 1, ["b"])}  # rejected, and accepted by the judge
    assert counts.metrics()["reward_loop/audit/asked"] == 2.0
    rows = rows_of(tmp_path)
    assert {row["function"].partition(" ")[0] for row in rows} == {"judge"}
    assert sorted((row["probe"], row["uid"], row["score"], row["probe_score"]) for row in rows) == [
        ("reference", "a", 1.0, 1.0),
        ("reference", "b", 1.0, 0.0),
    ]
    assert [row["components"] for row in rows] == [{"clear": [0.75, 0.25]}] * 2
    await asyncio.to_thread(manager.close)


def test_a_reference_judge_that_cannot_be_loaded_is_named_with_its_option() -> None:
    with pytest.raises(ConfigError, match=r"reward_loop\.audit\.reference=nothing\.py:judge"):
        audited(lambda solution_str: 1.0, audit={"reference": "nothing.py:judge"})


async def test_a_manager_with_the_options_of_an_audit_stops_without_one() -> None:
    manager = NaiveRewardLoopManager(RewardLoopConfig(audit=AGAIN), compute_score=lambda solution_str: 1.0)
    with pytest.raises(ConfigError, match=r"reward_loop\.audit is on.*open_audit\(manager\)"):
        await manager.run_single(RewardSample("a"))
    with pytest.raises(ConfigError, match=r"reward_loop\.audit is on.*open_audit\(manager\)"):
        await RewardAgent(manager).__aenter__()  # before the first sample, which may come hours later
    manager.close()


# --- Records, and the end


async def test_a_row_of_the_records_has_both_scores(tmp_path: Path) -> None:
    scores = iter([1.0, 3.0])
    manager = audited(lambda solution_str: next(scores), log_dir=str(tmp_path))
    await manager.run_single(RewardSample("a" * 3000, uid="u1", group="g", step=4))
    await ended(manager)
    (row,) = rows_of(tmp_path)
    expected = {"kind": "audit", "uid": "u1", "group": "g", "step": 4, "score": 1.0, "probe_score": 3.0}
    assert (expected | {"probe": "again", "variant": "", "accepted": False, "outcome": "scored"}).items() <= row.items()
    assert len(row["answer"]) == audit.MAX_ANSWER


class Hanging(NaiveRewardLoopManager):
    """A manager whose probes hang, and suppress some cancellations."""

    suppressed = 0
    cancellations = 0

    async def score_one(self, sample: RewardSample) -> RewardResult:
        if sample.is_probe:
            await self.hang()
        return await super().score_one(sample)

    async def hang(self) -> None:
        self.started.set()
        while not self.release.is_set():
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancellations += 1
                if self.cancellations > self.suppressed:
                    raise

    @classmethod
    async def with_probe(cls, suppressed: int = 0) -> Hanging:
        """Return a manager in which a probe hangs."""
        manager = audited(lambda solution_str: 1.0, cls)
        assert isinstance(manager, Hanging)
        manager.suppressed, manager.started, manager.release = suppressed, asyncio.Event(), asyncio.Event()
        await manager.run_single(RewardSample("a"))
        await manager.started.wait()
        return manager


@pytest.mark.parametrize("suppressed", [0, 1, 3])
@pytest.mark.parametrize("is_drained", [True, False])
async def test_a_probe_that_hangs_has_ended_when_the_audit_is_closed(
    suppressed: int, is_drained: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit, "CANCEL_AGAIN_S", 0.01)
    manager = await Hanging.with_probe(suppressed)
    if is_drained:
        await audit_of(manager).drain(0.01)
    else:
        await asyncio.to_thread(manager.close)
    assert manager.cancellations == suppressed + 1
    assert not audit_of(manager)._running
    assert ("1 probe" in caplog.text) == is_drained


@pytest.mark.parametrize("is_drained", [True, False])
async def test_closing_does_not_wait_indefinitely_for_a_probe_that_suppresses_each_cancellation(
    is_drained: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The event loop waits for `ENDING_S`, and the thread of `close` for the sum: a busy machine's loop starts late.
    monkeypatch.setattr(audit, "ENDING_S", 0.1)
    monkeypatch.setattr(audit, "CANCEL_AGAIN_S", 30)
    manager = await Hanging.with_probe(suppressed=10**9)
    async with asyncio.timeout(60):
        await (audit_of(manager).drain(0.01) if is_drained else asyncio.to_thread(manager.close))
    assert "1 probes do not end" in caplog.text
    manager.release.set()
    await asyncio.wait(audit_of(manager)._running)


async def test_closing_does_not_wait_for_a_thread_in_which_a_judge_hangs() -> None:
    release, calls = threading.Event(), itertools.count()

    def compute_score(solution_str: str) -> float:
        if next(calls):
            release.wait(60)
        return 1.0

    manager = audited(compute_score, max_threads=4)
    await manager.run_single(RewardSample("a"))
    async with asyncio.timeout(30):
        await asyncio.to_thread(manager.close)
    assert not audit_of(manager)._running
    release.set()


async def test_a_closed_audit_starts_no_probes() -> None:
    manager = await Hanging.with_probe()
    manager.close()  # on the event loop it cannot wait
    await asyncio.wait(audit_of(manager)._running)
    await manager.run_single(RewardSample("b"))
    assert not audit_of(manager)._running
    assert manager.cancellations == 1


async def test_closing_does_not_wait_indefinitely_for_a_blocked_event_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit, "ENDING_S", 0.1)
    monkeypatch.setattr(audit, "CANCEL_AGAIN_S", 0.01)
    manager = await Hanging.with_probe()
    closing = threading.Thread(target=manager.close)
    closing.start()
    closing.join(60)  # blocks the event loop
    assert not closing.is_alive()
    assert "the event loop did not end the probes" in caplog.text


async def test_an_error_that_would_stop_a_run_does_not_leave_a_probe() -> None:
    calls = itertools.count()

    async def compute_score(solution_str: str) -> float:
        if next(calls):
            raise ConfigError("no API key")
        return 1.0

    manager = audited(compute_score)
    await manager.run_single(RewardSample("a"))
    assert (await ended(manager)).without_score == 1


async def test_a_judge_that_accepts_a_master_key_in_60_percent_of_cases_is_warned_of_in_the_first_step() -> None:
    asked = itertools.count()

    async def judge(solution_str: str, ground_truth: str) -> float:
        if solution_str == ":":
            return float(next(asked) % 5 < 3)
        return float(solution_str == ground_truth)

    options = {"share": 1.0, "probes": ["master_key"], "keys": [":"]}
    manager = audited(judge, audit=options)
    samples = [RewardSample(str(number % 2), ground_truth="1", uid=str(number)) for number in range(32)]
    await scores_of(manager, samples)
    counts = await ended(manager)
    count = counts.probes["canary/master_key"]
    assert (count.asked, count.accepted) == (32, 20)
    step = Observation(
        step=1,
        rewards=np.array([float(sample.solution_str) for sample in samples]),
        groups=np.arange(32) // 4,
        lengths=np.ones(32),
        scores=np.array([float(sample.solution_str) for sample in samples]),
        probes=counts.probes,
    )
    (warning,) = HealthWatch(HealthConfig(), str).check(step).warnings
    assert (warning.monitor, warning.subject, warning.value) == ("canaries", "master_key", 0.625)
    assert set(warning.samples) <= {sample.uid for sample in samples}
