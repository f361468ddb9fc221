"""Proofs: what a broken scorer returned is scored again elsewhere."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from reward_loop import NaiveRewardLoopManager, Outcome, RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop.audit import open_audit
from reward_loop.errors import BrokenScorerError
from reward_loop.limits.server import serve_limits
from reward_loop.scoring import proofs
from reward_loop.scoring.known_answers import TEMPLATES
from tests.scoring import scorers

TRUTHS = [str(number) for number in range(300)]


@pytest.fixture(autouse=True)
def unbroken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorers, "forged", False)
    monkeypatch.setattr(scorers, "calls", [])


@pytest.fixture
def scoring():
    """Yield a function that makes a `ScoringFunction`, closed at the end of the test."""
    made: list[ScoringFunction] = []

    def new(function: Any, **options: Any) -> ScoringFunction:
        made.append(ScoringFunction(function, options=RewardLoopConfig(**{"max_processes": 2, **options})))
        return made[-1]

    yield new
    for function in made:
        function.close()


def rows(**special: str) -> list[RewardSample]:
    """Return samples whose answers are right and wrong in turn, except the special ones, by their number."""
    answers = {truth: f"#### {int(truth) + int(truth) % 2}" for truth in TRUTHS}
    answers |= {name.removeprefix("row"): answer for name, answer in special.items()}
    return [RewardSample(answers[truth], data_source="sums", ground_truth=truth, uid=truth) for truth in TRUTHS]


def wrongly_scored(samples: list[RewardSample], results: list[Any]) -> list[str | None]:
    """Return the samples with a wrong score, or without one."""
    pairs = zip(samples, results, strict=True)
    return [s.uid for s, r in pairs if r.score != float(s.solution_str == f"#### {s.ground_truth}")]


async def score_all(function: ScoringFunction, samples: list[RewardSample]) -> list[Any]:
    return list(await asyncio.gather(*map(function, samples)))


@pytest.mark.integration
@pytest.mark.parametrize("isolation", ["process", "thread"])
async def test_only_the_answer_that_breaks_the_scorer_has_no_score(scoring, isolation, caplog):
    function = scoring(scorers.can_be_forged, isolation=isolation)
    samples = rows(row100="forge")
    results = await score_all(function, samples)
    assert wrongly_scored(samples, results) == ["100"]
    assert results[100].outcome is Outcome.FAILED
    assert "breaks its process: after the call, a known right answer scored no more than a wrong" in results[100].error
    assert function.in_processes
    assert "failed a proof, so its scores may be wrong: data source 'sums'" in caplog.text
    counts = function.proofs.take()
    assert counts.failed >= 2
    assert counts.rescored >= 2
    assert counts.replaced >= 1
    assert function.proofs.take() == proofs.ProofCounts()


@pytest.mark.integration
async def test_a_break_is_found_within_128_samples_of_the_process(scoring):
    function = scoring(scorers.can_be_forged, isolation="process", max_processes=1)
    samples = rows(row100="forge")
    await score_all(function, samples)
    assert function.proofs.take().rescored <= 128 + 2


@pytest.mark.integration
async def test_a_scorer_that_dies_quietly(scoring):
    function = scoring(scorers.dies_quietly, isolation="process", max_processes=1)
    samples = rows(row50="kill", row51="#### 51")
    results = await score_all(function, samples)
    assert set(wrongly_scored(samples, results)) <= {"50"}  # "kill" is wrong, and may also count as failed


@pytest.mark.integration
async def test_a_process_that_ends_before_its_proof_is_not_believed(scoring):
    function = scoring(scorers.can_be_forged, isolation="process", max_processes=1)
    samples = rows(row20="forge", row40="end")
    results = await score_all(function, samples)
    assert wrongly_scored(samples, results) == ["20", "40"]


async def test_a_function_that_cannot_run_in_a_process_stops_the_run(scoring):
    function = scoring(scorers.cannot_be_sent())
    samples = rows(row100="forge")
    with pytest.raises(BrokenScorerError, match=r"failed a proof, .*cannot be pickled"):
        await score_all(function, samples)
    with pytest.raises(BrokenScorerError):
        await function(samples[0])


async def test_the_run_stops_if_moving_is_not_allowed(scoring):
    function = scoring(scorers.can_be_forged, proofs={"in_threads": "stop"})
    with pytest.raises(BrokenScorerError, match="Set isolation=process"):
        await score_all(function, rows(row7="forge"))


async def test_proofs_are_few_and_no_samples(scoring):
    function = scoring(scorers.is_right)
    samples = rows()
    for _ in range(10):
        assert wrongly_scored(samples, await score_all(function, samples)) == []
    made = function.proofs.take().made
    assert made >= 3
    scored = len([call for call in scorers.calls if call in {sample.solution_str for sample in samples}])
    assert 3000 <= scored <= 3000 + 2 * made + 2 * len(TEMPLATES)


async def test_a_single_sample_does_not_wait_for_others(scoring):
    function = scoring(scorers.is_right)
    async with asyncio.timeout(30):
        assert (await function(rows()[0])).score == 1.0
    assert function.proofs.take().made == 1


@pytest.mark.integration
@pytest.mark.parametrize("isolation", ["process", "thread"])
async def test_the_last_results_of_a_burst_do_not_wait(scoring, isolation, monkeypatch):
    monkeypatch.setattr(proofs, "_MIN_HOLD_S", 3600.0)
    monkeypatch.setattr(proofs, "_MAX_HOLD_S", 3600.0)
    function = scoring(scorers.can_be_forged, isolation=isolation)
    async with asyncio.timeout(60):
        for _ in range(3):
            assert not wrongly_scored(rows()[:40], await score_all(function, rows()[:40]))
    assert function.proofs.take().made <= 3 * 4  # not one for each sample


async def test_off(scoring):
    function = scoring(scorers.is_right, proofs={"every": None})
    await function(rows()[0])
    assert scorers.calls == ["#### 0"]


async def asks_a_judge(solution_str, ground_truth):
    return 1.0


def needs_a_model(solution_str, ground_truth, reward_router_address):
    return 1.0


def reads_no_truth(solution_str):
    return 1.0


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (asks_a_judge, {}),
        (needs_a_model, {}),
        (reads_no_truth, {}),
        (scorers.is_right, {"limits": {"default": {"max_concurrent": 4}}}),
        (scorers.is_right, {"budget": {"max_cost": 1.0}}),
    ],
)
def test_functions_with_a_judge_have_none(scoring, function, options):
    assert scoring(function, **options).proofs is None


def boxed(solution_str, ground_truth):
    return {"score": 2.0 if f"\\boxed{{{ground_truth}}}" in solution_str else 0.1, "acc": 1}


def dapo(solution_str, ground_truth):
    return 1.0 if solution_str.rpartition("Answer: ")[2].strip() == ground_truth else -1.0


def in_list(solution_str, ground_truth):
    return float(any(f"<answer>{target}</answer>" in solution_str for target in ground_truth["target"]))


def of_gsm8k(solution_str, ground_truth):
    return float(solution_str.rpartition("#### ")[2] == ground_truth.rpartition("#### ")[2])


def with_thoughts(solution_str, ground_truth):
    return float("</think>" in solution_str) * (0.5 + 0.5 * float(f"<answer>{ground_truth}</answer>" in solution_str))


@pytest.mark.parametrize(
    ("function", "truth", "right"),
    [
        (boxed, "x+1", "\\boxed{x+1}"),
        (dapo, "72", "Answer: 72"),
        (in_list, {"target": ["Paris", "paris"]}, "<answer>Paris</answer>"),
        (of_gsm8k, "48 / 2 = 24\n#### 24", "#### 24"),
        (with_thoughts, 5, "<think>\nI compute it.\n</think>\n<answer>5</answer>"),
        (with_thoughts, "B", "<think>\nI compute it.\n</think>\n<answer>B</answer>"),
    ],
)
async def test_right_answers_are_made_from_the_ground_truth(scoring, function, truth, right):
    made = scoring(function)
    await made(RewardSample("?", data_source="d", ground_truth=truth))
    pair = made.proofs.pairs["d"]
    assert right in pair.right.solution_str
    assert pair.wrong.solution_str != pair.right.solution_str
    assert pair.gap > 0


async def test_the_wrong_answer_is_the_right_one_of_another_sample(scoring):
    made = scoring(dapo)
    truths = ["72", "31", "8"]
    await asyncio.gather(*(made(RewardSample("?", data_source="d", ground_truth=truth)) for truth in truths))
    assert made.proofs.pairs["d"].wrong.solution_str == "Answer: 31"


def in_an_unusual_form(solution_str, ground_truth):
    return float(solution_str == f"[[[{ground_truth}]]]")


async def test_labelled_answers_prove_what_no_form_does(tmp_path):
    lines = [
        {"solution_str": "[[[5]]]", "label": True, "ground_truth": "5", "data_source": "sums"},
        {"solution_str": "[[[6]]]", "label": False, "ground_truth": "5", "data_source": "sums"},
        {"solution_str": "6", "label": False, "ground_truth": "6", "data_source": "other"},
    ]
    (tmp_path / "labelled.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = RewardLoopConfig(audit={"labelled": str(tmp_path / "labelled.jsonl")})
    manager = NaiveRewardLoopManager(options, compute_score=in_an_unusual_form)
    open_audit(manager)
    for source in ("sums", "other"):
        await manager.score(RewardSample("[[[7]]]", data_source=source, ground_truth="7"))
    assert list(manager.function.proofs.pairs) == ["sums"]
    pair = manager.function.proofs.pairs["sums"]
    assert (pair.right.solution_str, pair.wrong.solution_str) == ("[[[5]]]", "[[[6]]]")
    assert manager.function.proofs.tried == {"sums", "other"}
    await asyncio.to_thread(manager.close)


def of_a_prompt(solution_str, ground_truth, prompt, is_truncated):
    return float(prompt == "What is it?" and not is_truncated and solution_str == f"#### {ground_truth}")


def in_trls_form(completions, prompts, solution):
    return [float(bool(p) and c == f"#### {s}") for c, p, s in zip(completions, prompts, solution, strict=True)]


@pytest.mark.parametrize("function", [of_a_prompt, in_trls_form])
async def test_known_answers_have_the_other_arguments_of_a_sample(scoring, function):
    made = scoring(function)
    await made(RewardSample("#### 4", ground_truth="5", prompt="What is it?", is_truncated=True))
    assert made.proofs.pairs[""].right.solution_str == "#### 5"


def ignores_the_answer(solution_str, ground_truth):
    return 0.5


scores = iter(range(1000))


def never_the_same(solution_str, ground_truth):
    return next(scores)


@pytest.mark.parametrize("function", [ignores_the_answer, never_the_same])
async def test_a_source_without_a_right_answer_is_reported_once_and_not_proven(scoring, function, caplog):
    caplog.set_level("INFO")
    made = scoring(function)
    for _ in range(3):
        assert (await made(RewardSample("?", data_source="d", ground_truth="5"))).outcome is Outcome.SCORED
    assert caplog.text.count("data source 'd': its scores are not proven") == 1
    counts = made.proofs.take()
    assert (counts.made, counts.unproven) == (0, 1)


async def test_a_function_past_its_deadline_only_because_of_the_proof_is_no_failure(scoring, monkeypatch):
    monkeypatch.setattr(proofs, "_MIN_HOLD_S", 1.0)
    made = scoring(scorers.is_right, timeout=0.2)
    result = await made(rows()[0])
    assert result.score == 1.0


async def test_a_sync_function_that_returns_an_awaitable_keeps_its_deadline(scoring):
    def later(solution_str, ground_truth):
        return asyncio.sleep(60, float(solution_str == ground_truth))

    made = scoring(later, timeout=0.2)
    result = await made(RewardSample("5", ground_truth="5"))
    assert "ran past its deadline" in result.error


@pytest.mark.integration
@pytest.mark.parametrize("is_limited", [False, True])
@pytest.mark.parametrize("isolation", ["process", "thread"])
async def test_a_function_that_uses_a_limit_is_proven_without_permits(scoring, isolation, is_limited):
    """Wherever it runs, and also if the job has limits that the options of this process do not have."""
    limits = {"judge": {"max_concurrent": 1}} if is_limited else {}
    with serve_limits(RewardLoopConfig(limits=limits)) as address:
        function = scoring(scorers.is_right_within_a_limit, isolation=isolation, job=address)
        samples = rows()[:40]
        async with asyncio.timeout(60):
            assert wrongly_scored(samples, await score_all(function, samples)) == []
        assert list(function.proofs.pairs) == ["sums"]
        counts = function.proofs.take()
        assert counts.made > 0
        assert (counts.failed, counts.rescored, counts.unproven) == (0, 0, 0)
        await asyncio.to_thread(function.close)
