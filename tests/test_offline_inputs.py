"""The inputs of ``reward-loop score`` and ``check``: files, records, fields."""

import math
import re

import pytest

from reward_loop import ConfigError
from reward_loop.offline.inputs import Fields, Inputs, Row, check_fields
from tests.records.rows import sample, write

ROWS = [{"solution_str": str(i)} for i in range(12)]


def texts(rows):
    return [row.columns["solution_str"] for row in rows]


def test_rows_of_records_have_different_names(tmp_path):
    uids = ["x", "x (2)", "x", "x (2)", "row 5", None, "x"]
    write(tmp_path, *(sample(uid, id=str(index)) for index, uid in enumerate(uids)))
    names = [row.name for row in Inputs(tmp_path).rows()]
    assert names == ["x", "x (2)", "x (3)", "x (2) (2)", "row 5", "row 5 (2)", "x (4)"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04\xff", "line 1: not JSON, with one object in each line, and the file is not named .parquet"),
        (b"[\n {},\n {}\n]\n", "line 1: not JSON, with one object in each line"),
        (b"output,gts\n", "line 1: not JSON"),
    ],
)
def test_a_file_in_another_format_has_no_row_that_can_be_scored(tmp_path, content, message):
    (tmp_path / "rollouts").write_bytes(content)
    inputs = Inputs(tmp_path / "rollouts")
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_fields(inputs.rows(), str(inputs.path), Fields())


ROW = {
    "solution_str": "4",
    "prompt": "2+2=",
    "response_ids": [19, 2],
    "is_truncated": False,
    "step": 3,
    "training_progress": 0.5,
    "validate": True,
    "solution": "4",
}


def test_a_row_gives_the_arguments_that_a_function_asks_for():
    requires = frozenset({"prompt", "response_ids", "response_length", "is_truncated", "global_steps", "validate"})
    sample = Fields().to_sample(Row("r", ROW))
    assert (sample.prompt, sample.response_ids, sample.response_length) == ("2+2=", [19, 2], 2)
    assert (sample.is_truncated, sample.global_steps, sample.training_progress, sample.validate) == (
        False,
        3,
        0.5,
        True,
    )
    for name in requires - {"response_length"}:
        field = "step" if name == "global_steps" else name
        given = {key: value for key, value in ROW.items() if key != field}
        without = Fields(requires=frozenset({name})).to_sample(Row("r", given))
        assert without.error is not None, name
        assert f"no field {field!r} (for {field})" in without.error


def test_a_required_field_has_its_type_and_another_is_left_out():
    row = Row("r", {**ROW, "is_truncated": "no", "response_ids": "4 2"})
    sample = Fields().to_sample(row)
    assert (sample.error, sample.is_truncated, sample.response_ids) == (None, None, None)
    error = Fields(requires=frozenset({"is_truncated"})).to_sample(row).error
    assert error == "field 'is_truncated' is 'no', not a valid is_truncated"


@pytest.mark.parametrize("value", [None, math.nan, [None], [math.nan, None]])
@pytest.mark.parametrize("name", ["data_source", "ground_truth", "prompt", "group"])
def test_a_field_without_a_value_is_as_one_that_is_not_there(name: str, value: object) -> None:
    row = Row("r", {"solution_str": "nan", name: value})
    sample = Fields().to_sample(row)
    assert (sample.error, sample.data_source) == (None, "")
    assert (sample.ground_truth, sample.prompt, sample.group) == (None, None, None)
    error = Fields(requires=frozenset({name})).to_sample(row).error
    assert error is not None
    assert name in error
