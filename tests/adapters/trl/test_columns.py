"""The conversion of TRL's columns to samples."""

from __future__ import annotations

from typing import Any

import pytest

from reward_loop import ConfigError, RewardSample
from reward_loop.adapters.trl.columns import Columns, group_sizes, text_of


def samples(columns: Columns, completions: list[Any], **data: Any) -> Any:
    return columns.samples(["p"] * len(completions), completions, None, data, step=3)


def test_named_columns_become_parts_and_the_others_extra_info() -> None:
    columns = Columns(ground_truth="answer", data_source="origin")
    first, second = samples(columns, ["4", "5"], answer=["4", "6"], origin=["a", "b"], level=[1, 2])
    assert first == RewardSample("4", "a", "4", {"level": 1}, prompt="p", step=3)
    assert (second.data_source, second.ground_truth, second.extra_info) == ("b", "6", {"level": 2})


def test_default_columns_are_used_if_the_data_set_has_them() -> None:
    (sample,) = samples(Columns(), ["x"], ground_truth=["1"], data_source=["math"], extra_info=[{"split": "train"}])
    assert (sample.ground_truth, sample.data_source, sample.extra_info) == ("1", "math", {"split": "train"})
    (bare,) = samples(Columns(), ["x"])
    assert (bare.ground_truth, bare.data_source, bare.extra_info, bare.error) == (None, "", {}, None)


def test_a_dotted_path_reads_the_columns_of_a_data_set_for_verl() -> None:
    data = {"reward_model": [{"style": "rule", "ground_truth": "7"}], "extra_info": [{"index": 1}], "ability": ["math"]}
    (sample,) = samples(Columns(ground_truth="reward_model.ground_truth"), ["7"], **data)
    assert sample.ground_truth == "7"
    assert sample.extra_info == {"index": 1, "ability": "math", "reward_model": data["reward_model"][0]}


def test_a_row_without_the_end_of_a_dotted_path_fails_alone() -> None:
    columns = Columns(ground_truth="reward_model.ground_truth")
    good, bad = samples(columns, ["7", "8"], reward_model=[{"ground_truth": "7"}, {}])
    assert good.error is None
    assert "no 'reward_model.ground_truth'" in bad.error


def test_extra_info_that_is_not_a_mapping_fails_the_sample() -> None:
    (sample,) = samples(Columns(extra_info="meta"), ["x"], meta=["text"])
    assert "'meta' must be a mapping" in sample.error


def test_the_callers_extra_info_is_not_changed() -> None:
    nested = {"split": "train"}
    (sample,) = samples(Columns(), ["x"], extra_info=[nested], level=[1])
    assert sample.extra_info == {"split": "train", "level": 1}
    assert nested == {"split": "train"}


def test_completion_ids_give_the_length_of_the_response() -> None:
    (sample,) = Columns().samples(["p"], ["x"], [[5, 6, 7]], {}, step=None)
    assert sample.response_length == 3


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        ([{"role": "assistant", "content": "one"}], "one"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}], "a"),
        (
            [
                {"role": "assistant", "content": "look it up", "tool_calls": [{}]},
                {"role": "tool", "content": "42"},
                {"role": "assistant", "content": "It is 42."},
            ],
            "look it up\nIt is 42.",
        ),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], ""),
        ([], ""),
    ],
)
def test_the_text_of_plain_and_conversational_completions(completion: Any, text: str) -> None:
    assert text_of(completion) == text


def test_all_messages_of_a_completion_with_tools_are_in_extra_info() -> None:
    messages = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
    (sample,) = samples(Columns(), [messages])
    assert sample.extra_info == {"completion": messages}


def test_a_wrong_column_name_lists_the_columns_and_suggests_one() -> None:
    with pytest.raises(ConfigError, match=r"no column 'anwser' for ground_truth='anwser'.*'answer'.*answer, level"):
        Columns(ground_truth="anwser").check({"answer": ["1"], "level": [2]}, 1, frozenset())


def test_a_missing_column_that_the_function_requires_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"the reward function, which requires ground_truth.*ground_truth=\.\.\."):
        Columns().check({"answer": ["1"]}, 1, frozenset({"ground_truth", "extra_info"}))
    Columns().check({"ground_truth": ["1"]}, 1, frozenset({"ground_truth", "extra_info"}))


@pytest.mark.parametrize("values", [["1"], "12", 5])
def test_a_column_needs_a_value_for_each_completion(values: Any) -> None:
    with pytest.raises(ConfigError, match="column 'answer' must be a list with 2 values"):
        Columns().check({"answer": values}, 2, frozenset())


def test_neighbours_with_the_same_prompt_are_a_group() -> None:
    assert group_sizes(["a", "a", "b", "a"], None, exact=True) == [2, 1, 1]
    chat = [[{"role": "user", "content": text}] for text in "aab"]
    assert group_sizes(chat, None, exact=True) == [2, 1]
    assert group_sizes([], None, exact=True) == []


def test_the_group_size_separates_neighbouring_groups_with_the_same_prompt() -> None:
    assert group_sizes(["a"] * 4 + ["b"] * 2, 2, exact=True) == [2, 2, 2]


def test_an_incomplete_group_is_an_error_only_if_groups_must_be_complete() -> None:
    assert group_sizes(["a"] * 3, 2, exact=False) == [2, 1]
    with pytest.raises(ConfigError, match="whole groups of group_size=2, and this process has 3 completions"):
        group_sizes(["a"] * 3, 2, exact=True)
