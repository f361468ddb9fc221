import asyncio
import math
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from reward_loop import (
    ConfigError,
    NaiveRewardLoopManager,
    Outcome,
    RewardFunctionError,
    RewardLoopConfig,
    RewardLoopManagerBase,
    RewardResult,
    RewardSample,
    ScoringError,
    ScoringFunction,
    TooManyFailuresError,
    UnscoredError,
)
from reward_loop.managers import scoring_function
from reward_loop.offline.inputs import Fields, Inputs
from reward_loop.records.reader import RecordsReader
from reward_loop.types import RESERVED_KEYS
from tests.managers.letters import Tokenizer, batch, column


def one_row(**columns):
    row = {"data_source": "math", "reward_model": {"ground_truth": "abc"}, "extra_info": {"level": 1}}
    row.update(columns)
    return batch(
        [[1, 2, 3, 0, 9]],
        [[0, 1, 1, 1, 1, 1, 1, 0]],
        **{name: [value] for name, value in row.items() if value is not None},
    )


def exact(solution_str, ground_truth):
    return float(solution_str == ground_truth)


def manager(function=exact, config=None, **kwargs):
    return NaiveRewardLoopManager(config=config, tokenizer=Tokenizer(), compute_score=function, **kwargs)


async def test_a_row_becomes_a_sample():
    data = one_row(
        uid="u1", __num_turns__=2, reward_scores={"tool": 0.5}, tool_extra_fields={"calls": 3}, level="ignored"
    )
    caller = data.non_tensor_batch["extra_info"][0]
    sample = await manager().to_sample(data)
    assert sample == RewardSample(
        "abc",
        "math",
        "abc",
        {"level": 1, "calls": 3, "num_turns": 2, "rollout_reward_scores": {"tool": 0.5}},
        "u1",
        response_length=4,
        group="u1",
        validate=None,
    )
    assert caller == {"level": 1}


async def test_results_of_tools_and_interactions_reach_the_function():
    def compute_score(solution_str, extra_info):
        parts = [*extra_info["turn_scores"], float(solution_str == "ab")]
        return {"score": sum(parts) + sum(extra_info["tool_rewards"]), "turn_level_scores": parts}

    # Two outputs of a rollout, with what verl's tool agent loop leaves beside each.
    data = batch(
        [[3, 3], [1, 2]],
        [[1, 1, 1], [1, 1, 1]],
        tool_extra_fields=[
            {"turn_scores": [9.0], "tool_rewards": [9.0]},
            {"turn_scores": [0.5], "tool_rewards": [0.25]},
        ],
        data_source=["math"] * 2,
    )
    reward = await manager(compute_score).run_single(data)
    assert reward["reward_score"] == 1.75
    assert reward["reward_extra_info"]["turn_level_scores"] == [0.5, 1.0]


@pytest.mark.parametrize("value", [math.nan, np.float64("nan"), np.datetime64("NaT"), [None], np.array([np.nan])])
async def test_a_reference_or_a_source_that_is_missing_is_never_a_text(value):
    """An answer "nan" must not be right, and no function may choose by the source "None"."""
    texts = []

    def takes(solution_str, data_source="given", ground_truth="given"):
        texts.append((data_source, ground_truth))

    data = one_row(data_source=value, reward_model={"ground_truth": value})
    await manager(takes).run_single(data)
    assert texts == [("", None)]
    for function, what in ((exact, "ground_truth"), (lambda data_source: 1.0, "data_source")):
        info = (await manager(function).run_single(data))["reward_extra_info"]
        assert (info["reward_outcome"], info["reward_masked"]) == ("failed", True)
        assert f'"{what}"], which the function requires' in info["reward_error"]
    for columns in ({"reward_model": value}, {"extra_info": value}, {"tool_extra_fields": value}):
        info = (await manager(takes).run_single(one_row(**columns)))["reward_extra_info"]
        assert info["reward_outcome"] == "unscored"


@pytest.mark.parametrize(
    ("function", "columns", "error"),
    [
        (exact, {"reward_model": {}}, 'no non_tensor_batch["reward_model"]["ground_truth"]'),
        (exact, {"reward_model": None}, 'no non_tensor_batch["reward_model"]["ground_truth"]'),
        (exact, {"reward_model": '{"ground_truth": "abc"}'}, 'non_tensor_batch["reward_model"] must be a mapping; got'),
        (exact, {"extra_info": [1, 2]}, 'non_tensor_batch["extra_info"] must be a mapping; got [1, 2]'),
        (lambda data_source: 1, {"data_source": None}, 'no non_tensor_batch["data_source"]'),
        (lambda solution_str, ground_truth=None: 1, {"reward_model": None}, ""),
        (lambda **kwargs: 1, {"reward_model": None, "data_source": None, "extra_info": None}, ""),
    ],
)
async def test_a_missing_field_fails_only_where_the_function_requires_it(function, columns, error):
    reward = await manager(function).run_single(one_row(uid="u1", **columns))
    if error:
        assert error in reward["reward_extra_info"]["reward_error"]
        assert "u1" in reward["reward_extra_info"]["reward_error"]
    assert reward["reward_extra_info"]["reward_outcome"] == ("failed" if error else "scored")


async def test_a_dataproto_needs_a_tokenizer():
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        await NaiveRewardLoopManager(compute_score=exact).run_single(one_row())


async def test_score_needs_a_function():
    with pytest.raises(ConfigError, match="has no compute_score"):
        await NaiveRewardLoopManager().score(RewardSample("x"))


def fails(solution_str):
    raise KeyError("rubric")


POLICIES = [
    (fails, "on_failed", Outcome.FAILED, RewardFunctionError),
    (lambda: None, "on_unscored", Outcome.UNSCORED, UnscoredError),
]


@pytest.mark.parametrize(("function", "option", "outcome", "error"), POLICIES)
async def test_policies(function, option, outcome, error):
    other = {"on_failed": "on_unscored", "on_unscored": "on_failed"}[option]
    sample = RewardSample("x", uid="u1")
    for policy, score, masked in (("mask", 0.0, True), ("default", -1.0, False)):
        reward = await manager(function, {option: policy, "default_score": -1, other: "raise"}).run_single(sample)
        info = reward["reward_extra_info"]
        assert (reward["reward_score"], info["reward_masked"], info["reward_outcome"]) == (score, masked, outcome)
    with pytest.raises(error, match="u1"):
        await manager(function, {option: "raise"}).run_single(sample)


async def test_every_reward_has_the_same_keys_of_the_loop_and_its_own_of_the_function():
    # In verl 0.9, the first sample's keys are taken for all.
    def ragged(solution_str):
        return {"a": {"score": 1, "a": 1}, "b": {"score": 2, "b": 2}, "c": None, "d": "no score"}[solution_str]

    rewards = [await manager(ragged).run_single(RewardSample(name)) for name in "abcd"]
    infos = [reward["reward_extra_info"] for reward in rewards]
    assert [set(info) - RESERVED_KEYS for info in infos] == [{"score", "a"}, {"score", "b"}, set(), set()]
    for info in infos:
        assert set(info) >= RESERVED_KEYS
        assert type(info["reward_outcome"]) is str
        assert type(info["reward_masked"]) is bool
        assert type(info["reward_error"]) is str
        assert info["reward_work_s"] >= 0


async def test_a_run_whose_samples_fail_stops():
    failing = manager(fails, {"min_samples_for_failed_share": 3})
    for _ in range(2):
        await failing.run_single(RewardSample("x"))
    with pytest.raises(TooManyFailuresError, match=r"(?s)3 of the last 3.*sample u9: fails .*KeyError: 'rubric'"):
        await failing.run_single(RewardSample("x", uid="u9"))


@pytest.mark.parametrize(
    ("config", "timeout"),
    [
        (None, 300),
        (RewardLoopConfig(timeout=5), 5),
        ({"timeout": 5}, 5),
        ({"actor_rollout_ref": {}, "reward": {}, "reward_loop": {"timeout": 5}}, 5),
        ({"actor_rollout_ref": {}, "reward": {}}, 300),
        ({"actor_rollout_ref": {}, "reward_loop": None}, 300),
    ],
)
def test_the_forms_of_configuration(config, timeout):
    made = manager(config=config)
    assert made.options.timeout == timeout
    assert made.function.timeout == timeout
    assert made.config is config


async def test_outputs_padded_into_one_batch_are_cut_at_their_own_length():
    # As verl's agent loop pads them: the mask is as wide as the longest output, and not aligned with its response.
    data = batch(
        [[1, 2, 3, 4], [5, 6, 0, 0]],
        [[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]],
        data_source=["m", "m"],
        reward_model=[{"ground_truth": "ef"}, {"ground_truth": "ef"}],
        response_len=[4, 2],
    )
    sample = await manager().to_sample(data)
    assert (sample.solution_str, sample.response_length) == ("ef", 2)


@pytest.mark.integration
def test_scores_are_assembled_at_the_last_response_token():
    torch = pytest.importorskip("torch")
    data = SimpleNamespace(
        batch={
            "responses": torch.tensor([[1, 2, 0], [1, 2, 3], [0, 0, 0]]),
            "attention_mask": torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0]]),
        }
    )
    scores = NaiveRewardLoopManager.assemble_rm_scores(data, [0.5, 2.0, 1.0])
    assert scores.tolist() == [[0, 0.5, 0], [0, 0, 2.0], [1.0, 0, 0]]


class ReturnsResult(RewardLoopManagerBase):
    """A manager of the user's own, which makes its results without exceptions."""

    result: RewardResult

    async def score_one(self, sample):
        return self.result


def manager_of(result, **options):
    manager = ReturnsResult(RewardLoopConfig(**options))
    manager.result = result
    return manager


@pytest.mark.parametrize(
    ("outcome", "error", "message"),
    [
        (Outcome.FAILED, "no such table", "sample q3: no such table"),
        (Outcome.FAILED, None, "sample q3: the reward manager returned failed without a cause"),
        (Outcome.UNSCORED, None, "sample q3: the reward manager returned unscored without a cause"),
    ],
)
async def test_raise_stops_the_run_at_a_managers_own_result_without_an_exception(outcome, error, message):
    manager = manager_of(RewardResult(outcome, None, error=error), on_failed="raise", on_unscored="raise")
    with pytest.raises(ScoringError, match=message) as raised:
        await manager.run_single(RewardSample("x", uid="q3"))
    assert isinstance(raised.value, UnscoredError) == (outcome is Outcome.UNSCORED)
    assert raised.value.sample_uid == "q3"


@pytest.mark.parametrize(("outcome", "score"), [(Outcome.SCORED, None), (Outcome.FAILED, 0.5), (Outcome.UNSCORED, 1.0)])
async def test_a_result_whose_outcome_and_score_contradict_each_other_has_failed(outcome, score):
    info = (await manager_of(RewardResult(outcome, score)).run_single(RewardSample("x", uid="q3")))["reward_extra_info"]
    assert (info["reward_outcome"], info["reward_masked"]) == ("failed", True)
    assert f"sample q3: the reward manager returned the outcome '{outcome}' with" in info["reward_error"]


@pytest.mark.parametrize("score", [True, np.float32(1), Decimal(1)], ids=repr)
async def test_the_reward_of_a_managers_own_result_is_a_float(score):
    """verl's tensors take no bool: a rollout would have no reward after it was published."""
    reward = await manager_of(RewardResult(Outcome.SCORED, score)).run_single(RewardSample("x"))
    assert (type(reward["reward_score"]), reward["reward_score"]) == (float, 1.0)


@pytest.mark.parametrize("score", ["1.0", np.ones(2), float("nan")], ids=str)
async def test_a_managers_own_result_whose_score_is_no_number_has_failed(score):
    reward = await manager_of(RewardResult(Outcome.SCORED, score)).run_single(RewardSample("x", uid="q3"))
    info = reward["reward_extra_info"]
    assert (info["reward_outcome"], info["reward_masked"]) == ("failed", True)
    assert "sample q3: " in info["reward_error"]


def test_arguments_beside_a_finished_scoring_function_are_refused():
    made = ScoringFunction(lambda bonus=0: 1.0)
    assert scoring_function(NaiveRewardLoopManager, made, RewardLoopConfig()) is made
    with pytest.raises(ConfigError, match="reward_kwargs have no effect"):
        scoring_function(NaiveRewardLoopManager, made, RewardLoopConfig(), reward_kwargs={"bonus": 1})


async def recorded(scored, data):
    """Score one sample, and return its row in the records and its texts."""
    await scored.run_single(data)
    await asyncio.to_thread(scored.close)
    reader = RecordsReader(Path(scored.options.log_dir))
    (row,) = reader.rows()
    return row, reader.text(row)


async def test_prompt_and_step_of_verls_rows_are_recorded(tmp_path):
    data = one_row(uid="q7", session_id=2, global_steps=np.int64(3))
    # As verl's agent loop builds it: an array of arrays of messages.
    data.non_tensor_batch["raw_prompt"] = np.array([[{"role": "user", "content": "2+2?"}]])
    row, text = await recorded(manager(config={"log_dir": str(tmp_path)}), data)
    assert [row[name] for name in ("uid", "group", "step", "response_length")] == ["q7_2", "q7", 3, 4]
    assert (text["prompt"], text["response"]) == ([{"role": "user", "content": "2+2?"}], "abc")
    assert (text["ground_truth"], text["extra_info"]["level"]) == ("abc", 1)


@pytest.mark.parametrize(
    ("lengths", "turns"), [([1, 1, 1, 1], [1, 1, 1, 0]), ([2, 2], [2, 1]), ([1, 1], None), (None, None)]
)
async def test_the_turns_of_a_response_are_recorded_if_their_texts_make_it_up(tmp_path, lengths, turns):
    data = one_row(uid="q7")
    if lengths is not None:
        data.non_tensor_batch["__turns__"] = np.array([lengths])
    _, text = await recorded(manager(config={"log_dir": str(tmp_path)}), data)
    assert text.get("turns") == turns


class LastLetters(NaiveRewardLoopManager):
    """Shows the function the last two letters of a response."""

    async def to_sample(self, data):
        sample = await super().to_sample(data)
        return replace(sample, solution_str=sample.solution_str[-2:])


@pytest.mark.parametrize("data", [RewardSample("abcd", uid="u"), one_row(uid="u", reward_model=None)])
async def test_records_keep_what_the_policy_wrote_if_to_sample_changes_it(tmp_path, data):
    folder = tmp_path / "rewards"
    scored = LastLetters({"log_dir": str(folder)}, tokenizer=Tokenizer(), compute_score=lambda solution_str: 1.0)
    _, text = await recorded(scored, data)
    whole = "abcd" if isinstance(data, RewardSample) else "abc"
    assert (text["response"], text["solution_str"]) == (whole, whole[-2:])
    (again,) = Inputs(folder).rows()
    assert Fields().to_sample(again).solution_str == whole  # for a re-scoring


async def test_the_configuration_of_verl_is_not_read_for_each_sample():
    class Config(dict):
        reads = 0

        def get(self, *key):
            Config.reads += 1
            return super().get(*key)

    config = Config(trainer=Config(v1=Config(trainer_mode="sync")))
    manager = NaiveRewardLoopManager(config=config, tokenizer=Tokenizer(), compute_score=lambda solution_str: 1.0)
    Config.reads = 0
    for _ in range(3):
        assert (await manager.run_single(one_row()))["reward_score"] == 1.0
    assert Config.reads == 0


ASKED = ("prompt", "response_ids", "response_length", "is_truncated", "global_steps", "training_progress", "validate")
OF_VERL = {"actor_rollout_ref": {"rollout": {"response_length": 4}}, "trainer": {"v1": {"trainer_mode": "sync"}}}


async def asked_of(row, config=OF_VERL, eos=9):
    seen = {}

    def compute_score(prompt=0, response_ids=0, response_length=0, is_truncated=0, global_steps=0,
                      training_progress=0, validate=0):  # fmt: skip
        seen.update(locals())
        return 1.0

    made = manager(compute_score, config)
    made.tokenizer.eos_token_id = eos
    await made.run_single(row)
    return tuple(seen[name] for name in ASKED)


async def test_a_row_of_verl_gives_the_arguments_that_a_function_asks_for():
    columns = {"raw_prompt": column({"role": "user", "content": "?"}), "global_steps": 3}
    chat = [{"role": "user", "content": "?"}]
    row = one_row(**columns, __validate__=False, __total_training_steps__=12)
    assert await asked_of(row) == (chat, [1, 2, 3, 0], 4, True, 3, 0.25, False)
    # An end token as the last of them: the response is complete.
    assert (await asked_of(row, eos=0))[3] is False
    # A rollout for a later step, in verl's own reward loop: neither validation nor the run's length is known.
    unknown = await asked_of(one_row(**columns), {"trainer": {"v1": {"trainer_mode": "separate_async"}}})
    assert unknown == (chat, [1, 2, 3, 0], 4, 0, 3, 0, 0)


async def test_special_tokens_are_kept_by_an_option():
    class Keeping(Tokenizer):
        def decode(self, ids, skip_special_tokens):
            return "".join("<s>" if i == 0 else chr(ord("a") + int(i) - 1) for i in ids if i or not skip_special_tokens)

    texts = []
    for config in ({}, {"skip_special_tokens": False}):
        made = NaiveRewardLoopManager({"reward_loop": config}, Keeping(), exact)
        texts.append((await made.to_sample(one_row())).solution_str)
    assert texts == ["abc", "abc<s>"]


def test_what_verls_own_reward_loop_does_not_pass_is_an_error_at_the_start():
    stock = {**OF_VERL, "reward_model": {}}
    with pytest.raises(ConfigError, match="requires training_progress, validate, which verl's own reward loop"):
        manager(lambda validate, training_progress: 1.0, stock)
    manager(lambda validate=None: 1.0, stock)
    manager(lambda validate: 1.0, {**OF_VERL, "reward_model": {"use_reward_loop": True}})
