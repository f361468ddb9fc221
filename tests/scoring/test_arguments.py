"""Which arguments a function receives by their names, and which samples lack one that it requires."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reward_loop import FunctionLoadError, Outcome, RewardSample, ScoringFunction
from reward_loop.scoring import ListScoringFunction
from tests.scoring.logging_functions import logging_function

CHAT = [{"role": "user", "content": "2+2="}]
SAMPLE = RewardSample(
    "4",
    "math",
    "4",
    {"level": 1},
    uid="u7",
    prompt=CHAT,
    response_ids=(19, 2),
    response_length=2,
    is_truncated=False,
    step=30,
    generated_step=29,
    training_progress=0.3,
    validate=True,
)
GIVEN: dict[str, Any] = {
    "prompt": CHAT,
    "response_ids": (19, 2),
    "response_length": 2,
    "is_truncated": False,
    "global_steps": 30,
    "training_progress": 0.3,
    "validate": True,
}


@pytest.mark.parametrize("name", GIVEN)
async def test_each_argument_is_passed_by_its_name_and_its_absence_is_named(name: str) -> None:
    seen: list[Any] = []
    required = ScoringFunction(logging_function(name, seen))
    optional = ScoringFunction(logging_function(name, seen, "=7"))
    assert required.requires == {name}
    assert (await required(SAMPLE)).score == 1.0
    fields = {"step": None, "generated_step": None} if name == "global_steps" else {name: None}
    without = replace(SAMPLE, **fields)
    assert (await optional(without)).score == 1.0
    assert seen == [GIVEN[name], 7]
    failed = await required(without)
    assert (failed.outcome, failed.attempts) == (Outcome.FAILED, 0)
    assert failed.error is not None
    assert f"it has no `{name}`, which" in failed.error
    assert "sample u7" in failed.error


async def test_functions_of_lists_get_lists() -> None:
    def lists(prompts, response_ids, response_lengths, is_truncated, global_steps, training_progress, validate):
        given = (prompts, response_ids, response_lengths, is_truncated, global_steps, training_progress, validate)
        assert given == tuple([value, value] for value in GIVEN.values())
        return [1, 2]

    assert [one.score for one in await ListScoringFunction(lists)([SAMPLE, SAMPLE])] == [1, 2]
    first, second = await ListScoringFunction(lambda prompts: [len(prompts)])([SAMPLE, replace(SAMPLE, prompt=None)])
    assert first.score == 1
    assert second.error is not None
    assert "it has no `prompt`" in second.error


async def test_functions_with_any_arguments_get_only_those_that_every_place_has() -> None:
    seen: dict[str, Any] = {}
    context = {"reward_router_address": "host:1", "reward_model_tokenizer": "tokenizer"}
    function = ScoringFunction(lambda **given: seen.update(given) or 0.0, reward_kwargs={"alpha": 2})
    await function(SAMPLE, **context)
    of_the_sample = {"data_source": "math", "solution_str": "4", "ground_truth": "4", "extra_info": {"level": 1}}
    assert seen == {**of_the_sample, **context, "alpha": 2}


async def test_the_function_cannot_change_the_prompt_and_gets_plain_values() -> None:
    def compute_score(prompt, response_ids):
        assert type(prompt) is type(response_ids) is list
        prompt[0]["content"] = "changed"
        return float(response_ids == [19, 2])

    array = np.empty(1, dtype=object)
    array[:] = CHAT
    result = await ScoringFunction(compute_score)(replace(SAMPLE, prompt=array, response_ids=np.array([19, 2])))
    assert (result.error, result.score) == (None, 1.0)
    assert CHAT == [{"role": "user", "content": "2+2="}]


async def test_a_judges_own_prompt_stays() -> None:
    def judge(solution_str, prompt="Is this right?"):
        return float(prompt == "Is this right?")

    assert (await ScoringFunction(judge)(SAMPLE)).score == 1.0
    configured = ScoringFunction(lambda prompt: float(prompt == "mine"), reward_kwargs={"prompt": "mine"})
    assert (await configured(SAMPLE)).score == 1.0


async def test_the_step_that_generated_a_sample_counts_while_the_other_is_unknown() -> None:
    function = ScoringFunction(lambda global_steps: global_steps)
    assert (await function(replace(SAMPLE, step=None))).score == 29


def trl(completions, solution, **kwargs):
    return [float(one[0]["content"] == truth) for one, truth in zip(completions, solution, strict=True)]


def openrlhf(queries, prompts, labels):
    return {"rewards": [float(q == p + a) for q, p, a in zip(queries, prompts, labels, strict=True)]}


def easyr1(reward_inputs):
    return [{"overall": float(one["response"] == one["ground_truth"])} for one in reward_inputs]


def easyr1_of_one(reward_input):
    return easyr1([reward_input])[0]


def rllm(task_info, action):
    return SimpleNamespace(reward=float(action == task_info["ground_truth"]))


async def verifiers(completion, answer):
    return float(completion[-1]["content"] == answer)


@pytest.mark.parametrize("function", [trl, openrlhf, easyr1, easyr1_of_one, rllm, verifiers])
async def test_a_function_of_another_trainer_is_refused_with_a_wrapper_that_works(function: Any) -> None:
    with pytest.raises(FunctionLoadError, match=r"this is the form of (TRL|OpenRLHF|EasyR1|rllm|verifiers)") as caught:
        ScoringFunction(function)
    names = {function.__name__: function}
    exec(str(caught.value).split("\n\n")[1], names)
    scoring = ScoringFunction(names["compute_score"])
    samples = [replace(SAMPLE, prompt="2+2="), replace(SAMPLE, prompt="2+2=", solution_str="5")]
    assert [(await scoring(sample)).score for sample in samples] == [1.0, 0.0]


def test_functions_of_lists_and_of_one_sample_name_the_manager_that_calls_them() -> None:
    with pytest.raises(FunctionLoadError, match="Choose the manager `batch`, or `group`"):
        ScoringFunction(lambda solution_strs, ground_truths: [])
    with pytest.raises(FunctionLoadError, match=r"passes lists\. Choose .* `naive`"):
        ListScoringFunction(lambda solution_str: 0.0)
