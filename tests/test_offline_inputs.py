"""The inputs of ``reward-loop score`` and ``check``: several files, patterns, compressed files."""

import gzip
import json
import math

import pytest

from reward_loop import ConfigError
from reward_loop.offline.fields import Fields
from reward_loop.offline.inputs import Inputs, Row
from tests.records.rows import sample, write

ROWS = [{"solution_str": str(i)} for i in range(12)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def texts(rows):
    return [row.columns["solution_str"] for row in rows]


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2"])
def test_compressed_files_are_read(tmp_path, suffix):
    pa = pytest.importorskip("pyarrow")
    source = tmp_path / f"rollouts.jsonl{suffix}"
    with pa.output_stream(str(source)) as file:
        file.write(LINES)
    inputs = Inputs.open([str(source)])
    assert inputs.count() == 12
    assert texts(inputs.rows()) == [str(i) for i in range(12)]
    source.write_bytes(source.read_bytes() * 2)  # the frames of a file are read one after another
    assert inputs.count() == 24


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_truncated_compressed_file_is_an_error_that_names_the_file(tmp_path, suffix):
    pa = pytest.importorskip("pyarrow")
    path = tmp_path / f"rollouts.jsonl{suffix}"
    with pa.output_stream(str(path)) as file:
        file.write(LINES * 1000)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=rf"rollouts\.jsonl{suffix} cannot be read: .*[Tt]runcated"):
        Inputs.open([str(path)]).count()


@pytest.mark.parametrize("name", ["rollouts.csv.gz", "rollouts.parquet.zst", "rollouts.xlsx"])
def test_other_formats_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(LINES))
    with pytest.raises(ConfigError, match=r"rollouts are JSONL, which may be compressed .*, or parquet"):
        Inputs.open([str(tmp_path / name)])


def test_a_json_array_is_refused_with_the_command_that_converts_it(tmp_path):
    (tmp_path / "rollouts.json").write_text("\n " + json.dumps(ROWS, indent=2))
    with pytest.raises(ConfigError, match=r"rollouts\.json is a JSON array: .*jq -c '\.\[\]'"):
        Inputs.open([str(tmp_path / "rollouts.json")])
    (tmp_path / "lines.json").write_bytes(LINES)
    assert Inputs.open([str(tmp_path / "lines.json")]).count() == 12


def test_several_inputs_are_one_after_another(tmp_path):
    for i in (1, 2, 10):
        (tmp_path / f"{i}.jsonl").write_text(json.dumps(ROWS[i]) + "\n" + json.dumps(ROWS[7]) + "\n")
    inputs = Inputs.open([str(tmp_path / "*.jsonl")])
    assert [path.name for path in inputs.paths] == ["1.jsonl", "2.jsonl", "10.jsonl"]
    assert texts(inputs.rows()) == ["1", "7", "2", "7", "10", "7"]
    assert [row.name for row in inputs.rows()][:3] == [
        f"{tmp_path}/1.jsonl line 1",
        f"{tmp_path}/1.jsonl line 2",
        f"{tmp_path}/2.jsonl line 1",
    ]
    assert inputs.count() == 6
    before = inputs.identity()
    (tmp_path / "10.jsonl").write_text(json.dumps(ROWS[3]) + "\n")
    assert inputs.identity() != before


def test_an_input_that_is_named_twice_is_read_once(tmp_path):
    for name in ("1.jsonl", "2.jsonl"):
        (tmp_path / name).write_bytes(LINES)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "1.jsonl")
    inputs = Inputs.open(
        [str(tmp_path / "2.jsonl"), str(tmp_path / "*.jsonl"), f"{tmp_path}/../{tmp_path.name}/1.jsonl"]
    )
    assert [path.name for path in inputs.paths] == ["2.jsonl", "1.jsonl"]
    assert inputs.count() == len({row.name for row in inputs.rows()}) == 24


def test_rows_of_records_have_different_names(tmp_path):
    uids = ["x", "x (2)", "x", "x (2)", "row 5", None, "x"]
    write(tmp_path, *(sample(uid, id=str(index)) for index, uid in enumerate(uids)))
    names = [row.name for row in Inputs.open([str(tmp_path)]).rows()]
    assert names == ["x", "x (2)", "x (3)", "x (2) (2)", "row 5", "row 5 (2)", "x (4)"]


@pytest.mark.parametrize(
    ("names", "message"),
    [(["none*.jsonl"], "no file matches none"), (["none.jsonl"], "no such file: none.jsonl")],
)
def test_inputs_that_cannot_be_read_are_refused(names, message):
    with pytest.raises(ConfigError, match=message):
        Inputs.open(names)


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path):
    (tmp_path / "step[1].jsonl").write_bytes(LINES)
    assert Inputs.open([str(tmp_path / "step[1].jsonl")]).count() == 12


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
        assert f"no field {field!r} (for {name})" in without.error


def test_the_step_is_named_as_the_argument_or_as_in_records():
    row = Row("r", {"solution_str": "4", "global_steps": 3, "at": 5})
    requires = frozenset({"global_steps"})
    assert Fields(requires=requires).to_sample(row).global_steps == 3
    for name in ("global_steps", "step"):
        assert Fields({name: "at"}, requires=requires).to_sample(row).global_steps == 5


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
