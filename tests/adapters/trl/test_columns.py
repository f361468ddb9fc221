"""The conversion of TRL's columns to samples."""

from __future__ import annotations

from typing import Any

import pytest

from reward_loop import ConfigError, RewardSample
from reward_loop.adapters.trl.reward import Columns, group_sizes, text_of


def samples(columns: Columns, completions: list[Any], **data: Any) -> Any:
    given = {"prompts": ["p"] * len(completions), "completions": completions}
    return columns.samples(given, data, frozenset())


def test_named_columns_become_parts_and_the_others_extra_info() -> None:
    columns = Columns(ground_truth="answer")
    first, second = samples(columns, ["4", "5"], answer=["4", "6"], data_source=["a", "b"], level=[1, 2])
    kwargs = {"prompts": ["p"], "completions": ["4"]}
    assert first == RewardSample("4", "a", "4", {"level": 1}, prompt="p", validate=None, kwargs=kwargs)
    assert (second.data_source, second.ground_truth, second.extra_info) == ("b", "6", {"level": 2})


def test_default_columns_are_used_if_the_data_set_has_them() -> None:
    nested = {"split": "train"}
    data: dict[str, Any] = {"ground_truth": ["1"], "data_source": ["math"], "extra_info": [nested], "level": [1]}
    (sample,) = samples(Columns(), ["x"], **data)
    assert (sample.ground_truth, sample.data_source) == ("1", "math")
    assert sample.extra_info == {"split": "train", "level": 1}
    assert nested == {"split": "train"}  # not changed
    (bare,) = samples(Columns(), ["x"])
    assert (bare.ground_truth, bare.data_source, bare.extra_info, bare.error) == (None, "", {}, None)


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_missing_data_source_is_no_name(value: Any) -> None:
    (sample,) = samples(Columns(), ["x"], data_source=[value])
    assert (sample.data_source, sample.error) == ("", None)
    # As in files and in verl's rows.
    given = {"prompts": ["p"], "completions": ["x"]}
    (sample,) = Columns().samples(given, {"data_source": [value]}, frozenset({"data_source"}))
    assert "'data_source' has no value" in (sample.error or "")


def test_a_dotted_path_reads_the_columns_of_a_data_set_for_verl() -> None:
    data = {"reward_model": [{"style": "rule", "ground_truth": "7"}], "extra_info": [{"index": 1}], "ability": ["math"]}
    (sample,) = samples(Columns(ground_truth="reward_model.ground_truth"), ["7"], **data)
    assert sample.ground_truth == "7"
    assert sample.extra_info == {"index": 1, "ability": "math", "reward_model": data["reward_model"][0]}


@pytest.mark.parametrize(
    ("columns", "row", "error"),
    [
        (Columns(ground_truth="a.b"), {"a": {}}, "no 'a.b'"),
        (Columns(), {"extra_info": "text"}, "'extra_info' must be a mapping"),
    ],
)
def test_a_row_with_a_wrong_value_fails_alone(columns: Columns, row: dict[str, Any], error: str) -> None:
    ((name, value),) = row.items()
    first, second = samples(columns, ["7", "8"], **{name: [{"b": "7"}, value]})
    assert first.error is None
    assert error in second.error


@pytest.mark.parametrize(
    ("completion", "text"),
    [
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


def test_a_completion_with_tools_has_its_messages_in_extra_info_and_the_length_of_its_tokens() -> None:
    messages = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
    (sample,) = Columns().samples({"prompts": ["p"], "completions": [messages], "completion_ids": [[5, 6, 7]]}, {})
    assert sample.extra_info == {"completion": messages}
    assert sample.response_length == 3


@pytest.mark.parametrize(
    ("columns", "data", "message"),
    [
        (
            Columns(ground_truth="anwser"),
            {"answer": ["1"], "level": [2]},
            r"no column 'anwser', .*'answer'\? Its columns are answer, level:",
        ),
        (Columns(), {"answer": ["1"]}, r"no column 'ground_truth', which is required.*ground_truth=\.\.\."),
        (Columns("answer"), {"answer": ["1", "2"]}, "column 'answer' must be a list with 1 values"),
    ],
)
def test_columns_that_do_not_fit_are_errors(columns: Columns, data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        columns.check(data, 1, frozenset({"ground_truth", "extra_info"}))
    Columns().check({"ground_truth": ["1"]}, 1, frozenset({"ground_truth", "extra_info"}))


@pytest.mark.parametrize(
    ("prompts", "size", "sizes"),
    [
        ("aaba", None, [2, 1, 1]),
        ([[{"role": "user", "content": text}] for text in "aab"], None, [2, 1]),
        ("aaaabb", 2, [2, 2, 2]),
    ],
)
def test_neighbours_with_the_same_prompt_are_groups(prompts: Any, size: int | None, sizes: list[int]) -> None:
    assert group_sizes(prompts, size, exact=True) == sizes


def test_an_incomplete_group_is_an_error_only_if_groups_must_be_complete() -> None:
    assert group_sizes(["a"] * 3, 2, exact=False) == [2, 1]
    with pytest.raises(ConfigError, match="whole groups of group_size=2, and this process has 3 completions"):
        group_sizes(["a"] * 3, 2, exact=True)
