"""Functions in the forms that people publish are taken as they are."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reward_loop import FunctionLoadError, Outcome, RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop.scoring import ListScoringFunction, isolated
from tests.scoring import published

CHAT = [{"role": "user", "content": "2+2="}]
SAMPLE = RewardSample(
    "4",
    "math",
    "4",
    {"level": 1},
    uid="u7",
    prompt=CHAT,
    response_ids=(19, 2, 2, 2),
    response_length=4,
    step=6,
    training_progress=0.6,
)
WRONG = replace(SAMPLE, solution_str="5", uid="u8")

FORMS: list[tuple[Any, str, float, float, dict[str, Any]]] = [
    (published.tagged, "a TRL function", 0.0, 0.0, {}),
    (published.solved, "a TRL function", 1.0, 0.0, {}),
    (published.of_texts, "a TRL function", 2.0, 1.0, {}),
    (published.Overlong, "a TRL function", -1.0, -1.0, {}),
    (published.scheduled, "a TRL function", 0.5, 0.5, {"length": 1, "weight": 0.5}),
    (published.reward_func, "an OpenRLHF function", 1.0, 0.0, {"length": 5}),
    (published.reward_list, "an OpenRLHF function", 1.0, 0.0, {}),
    (published.of_inputs, "an EasyR1 function", 1.1, 0.1, {"tokens": 4}),
    (published.of_input, "an EasyR1 function of one response", 1.0, 0.0, {"format": 1.0}),
    (published.of_predicts, "a function of EasyR1's older form", 1.0, 0.0, {}),
    (published.of_predict, "a function of the text of a response", 1.0, 0.0, {}),
    (published.batched, "a function of lists, as verl's reward manager `batch` calls it", 1.0, 0.0, {"source": "math"}),
    (published.MathFn, "an rllm function", 1.0, 0.0, {"level": 1}),
    (published.correct_answer, "a verifiers function", 1.0, 0.0, {}),
]


@pytest.mark.parametrize(("function", "form", "right", "wrong", "logged"), FORMS)
async def test_a_published_function_scores_single_samples(
    function: Any, form: str, right: float, wrong: float, logged: dict[str, Any]
) -> None:
    scoring = ScoringFunction(function)
    assert scoring.form == form
    results = [await scoring(sample) for sample in (SAMPLE, WRONG)]
    assert [(result.error, result.score) for result in results] == [(None, right), (None, wrong)]
    assert logged.items() <= dict(results[0].extra_info).items()


@pytest.mark.parametrize("function", [form[0] for form in FORMS if ScoringFunction(form[0]).takes_lists])
async def test_functions_of_lists_score_the_same_in_one_call(function: Any) -> None:
    alone = [await ScoringFunction(function)(sample) for sample in (SAMPLE, WRONG)]
    together = await ListScoringFunction(function)([SAMPLE, WRONG])
    assert [one.score for one in together] == [one.score for one in alone]
    assert [dict(one.extra_info) for one in together] == [dict(one.extra_info) for one in alone]


@pytest.mark.parametrize("function", [published.of_input, published.MathFn, published.correct_answer])
def test_functions_of_one_sample_need_a_manager_of_single_samples(function: Any) -> None:
    with pytest.raises(FunctionLoadError, match=r"passes lists\. Choose .* `naive`"):
        ListScoringFunction(function)


@pytest.mark.parametrize(
    ("sample", "score"),
    [
        (replace(SAMPLE, ground_truth=None, extra_info={"solution": "4"}), 1.0),
        (replace(SAMPLE, ground_truth="?"), None),
        # verl's GSM8K has the whole solution as `answer` beside the ground truth, which is the prepared one.
        (replace(SAMPLE, extra_info={"solution": "<<2+2>> #### 4.0"}), 1.0),
    ],
)
async def test_a_column_is_the_ground_truth_or_a_key_of_extra_info(sample: RewardSample, score: float | None) -> None:
    result = await ScoringFunction(published.solved)(sample)
    assert (result.error, result.score) == (None, score)


async def test_two_columns_that_mean_the_answer_keep_their_own_values() -> None:
    def both(completions, answer, solution):
        return [float(answer == ["4"] and solution == ["2+2=4"])]

    extra_info = {"solution": "2+2=4"}
    assert (await ScoringFunction(both)(replace(SAMPLE, extra_info=extra_info))).score == 1.0


async def test_a_missing_column_is_named_without_a_call() -> None:
    result = await ScoringFunction(lambda completions, difficulty: [1.0])(SAMPLE)
    assert (result.outcome, result.attempts) == (Outcome.FAILED, 0)
    assert result.error is not None
    assert "is a TRL function and requires the column 'difficulty', which extra_info does not have" in result.error
    assert "level" in result.error
    without = await ScoringFunction(published.of_texts)(replace(SAMPLE, prompt=None))
    assert without.error is not None
    assert "it has no `prompt`" in without.error


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("2+2=", "4"), (None, "4"), (CHAT, [{"role": "assistant", "content": "4"}])],
)
async def test_completions_are_texts_or_messages_as_the_prompt_is(prompt: Any, completion: Any) -> None:
    seen: list[Any] = []
    await ScoringFunction(lambda completions: seen.extend(completions) or [0.0])(replace(SAMPLE, prompt=prompt))
    assert seen == [completion]


async def test_columns_of_any_name_reach_keyword_arguments() -> None:
    seen: dict[str, Any] = {}
    await ScoringFunction(lambda completions, **columns: seen.update(columns) or [0.0])(SAMPLE)
    assert seen == {"level": [1], "ground_truth": ["4"], "data_source": ["math"]}


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (0.5, "must return a list of 1 scores"),
        ([1.0, 2.0], "must return a list of 1 scores"),
        ([ValueError("no")], "no"),
    ],
)
async def test_invalid_results_fail(returned: Any, problem: str) -> None:
    result = await ScoringFunction(lambda completions: returned)(SAMPLE)
    assert result.outcome is Outcome.FAILED
    assert result.error is not None
    assert problem in result.error


async def test_configured_arguments_and_the_cache_work(tmp_path: Path) -> None:
    cache = {"enabled": True, "path": str(tmp_path / "cache"), "version": "1"}
    options = RewardLoopConfig.model_validate({"cache": cache})
    scoring = ScoringFunction(published.of_inputs, reward_kwargs={"format_weight": 0.5}, options=options)
    assert [(await scoring(SAMPLE)).score for _ in range(2)] == [1.5, 1.5]
    assert (await scoring(SAMPLE)).attempts == 0
    with pytest.raises(FunctionLoadError, match="format_weigth; did you mean 'format_weight'"):
        ScoringFunction(published.of_inputs, reward_kwargs={"format_weigth": 0.5})
    assert (await ScoringFunction(published.Overlong, reward_kwargs={"limit": 9})(SAMPLE)).score == 0.0


def test_a_published_function_can_be_sent_to_a_process_and_keeps_its_mark() -> None:
    scoring = ScoringFunction(published.reward_func, isolation="process")
    assert scoring.in_processes
    call = pickle.loads(pickle.dumps(scoring._target.call))
    row = {"solution_str": "4", "prompt": "2+2=", "ground_truth": "4", "extra_info": {}, "data_source": ""}
    assert call(rows=[row])["score"] == 1.0
    assert ScoringFunction(isolated(lambda completions: [1.0])).in_processes


async def test_extra_info_that_contains_itself_fails_without_a_call() -> None:
    extra_info: dict[str, Any] = {"solution": "4"}
    extra_info["self"] = extra_info
    result = await ScoringFunction(published.solved)(replace(SAMPLE, extra_info=extra_info))
    assert result.error is not None
    assert "contains itself" in result.error


@pytest.mark.integration
async def test_a_published_function_runs_in_a_worker_process() -> None:
    scoring = ScoringFunction(published.solved, isolation="process", max_processes=1)
    try:
        assert [(await scoring(sample)).score for sample in (SAMPLE, WRONG)] == [1.0, 0.0]
    finally:
        await asyncio.to_thread(scoring.close)
