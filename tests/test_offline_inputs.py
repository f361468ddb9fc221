"""The inputs of ``reward-loop score`` and ``check``: several files, patterns, stdin, arrays, compressed files."""

import gzip
import io
import json
import sys

import pytest

from reward_loop import ConfigError, NaiveRewardLoopManager
from reward_loop.offline.compression import create
from reward_loop.offline.inputs import Inputs
from reward_loop.offline.rows import Fields, count_rows, read_rows
from reward_loop.offline.run import score_file

ROWS = [{"solution_str": str(i)} for i in range(12)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def one(solution_str):
    if solution_str == "7":
        raise ValueError("seven")
    return 1


def score(source, output, **options):
    inputs = source if isinstance(source, Inputs) else Inputs((source,))
    return score_file(inputs, output, NaiveRewardLoopManager(compute_score=one), fields=Fields(), **options)


def texts(rows):
    return [row.columns["solution_str"] for row in rows]


@pytest.fixture
def stdin(monkeypatch):
    def give(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_are_read_and_written(tmp_path, suffix):
    if suffix == ".zst":
        pytest.importorskip("zstandard")
    source = tmp_path / f"rollouts.jsonl{suffix}"
    with create(source, suffix) as file:
        file.write(LINES)
    assert count_rows(source) == 12
    with Inputs.open([str(source)]) as inputs:
        output = inputs.default_output()
        assert output == tmp_path / f"rollouts.scored.jsonl{suffix}"
        assert score(inputs, output).outcomes == {"scored": 11, "failed": 1}
    assert output.read_bytes()[:2] in (b"\x1f\x8b", b"\x28\xb5")
    assert [row.columns["row"] for row in read_rows(output)] == list(range(12))
    assert score(source, output, retry_failed=True).resumed == 11


def test_frames_of_a_zstandard_file_are_read_one_after_another(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "rollouts.jsonl.zst"
    path.write_bytes(zstandard.compress(LINES) + zstandard.compress(LINES))
    assert count_rows(path) == 24


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_truncated_compressed_file_is_an_error_that_names_the_file(tmp_path, suffix):
    if suffix == ".zst":
        pytest.importorskip("zstandard")
    path = tmp_path / f"rollouts.jsonl{suffix}"
    with create(path, suffix) as file:
        file.write(LINES * 1000)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=rf"rollouts\.jsonl{suffix} cannot be decompressed"):
        count_rows(path)


def test_without_zstandard_a_zst_file_is_an_error_that_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "in.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(ConfigError, match="pip install zstandard"):
        count_rows(tmp_path / "in.jsonl.zst")
    (tmp_path / "in.jsonl").write_bytes(LINES)
    with pytest.raises(ConfigError, match="pip install zstandard"):
        score(tmp_path / "in.jsonl", tmp_path / "out.jsonl.zst")
    assert not (tmp_path / "out.jsonl.zst.partial").exists()


@pytest.mark.parametrize("name", ["rollouts.csv.gz", "rollouts.parquet.zst"])
def test_other_compressed_formats_are_refused(tmp_path, name):
    (tmp_path / name).touch()
    with (
        pytest.raises(ConfigError, match="only JSONL and JSON arrays can be compressed"),
        Inputs.open([str(tmp_path / name)]),
    ):
        pass


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_json_array_is_read(tmp_path, compress):
    path = tmp_path / "rollouts.json"
    path.write_bytes(compress(b"\n " + json.dumps([*ROWS, 3], indent=2).encode()))
    rows = list(read_rows(path))
    assert texts(rows[:-1]) == [str(i) for i in range(12)]
    assert rows[7].name == "row 7"
    assert rows[-1].error == "expected a JSON object with named fields, got 3"
    assert count_rows(path) == 13
    assert Inputs((path,)).default_output() == tmp_path / "rollouts.scored.jsonl"


def test_a_broken_json_array_is_an_error_that_names_the_place(tmp_path):
    (tmp_path / "rollouts.json").write_text('[{"solution_str": "1"},\n {"solution_str"]')
    with pytest.raises(ConfigError, match=r"rollouts\.json cannot be read as a JSON array: .* line 2"):
        count_rows(tmp_path / "rollouts.json")


def test_lines_of_which_the_first_one_is_a_list_are_not_an_array(tmp_path):
    (tmp_path / "rollouts.jsonl").write_bytes(b"[1, 2]\n" + LINES)
    rows = list(read_rows(tmp_path / "rollouts.jsonl"))
    assert rows[0].error == "expected a JSON object with named fields, got [1, 2]"
    assert texts(rows[1:]) == [str(i) for i in range(12)]


def test_several_inputs_are_one_after_another(tmp_path):
    for i in (1, 2, 10):
        (tmp_path / f"{i}.jsonl").write_text(json.dumps(ROWS[i]) + "\n" + json.dumps(ROWS[7]) + "\n")
    with Inputs.open([str(tmp_path / "*.jsonl")]) as inputs:
        assert [path.name for path in inputs.paths] == ["1.jsonl", "2.jsonl", "10.jsonl"]
        assert texts(inputs.rows()) == ["1", "7", "2", "7", "10", "7"]
        assert [row.index for row in inputs.rows()] == list(range(6))
        assert inputs.count() == 6
        with pytest.raises(ConfigError, match="3 inputs are scored: name their output with --output FILE"):
            inputs.default_output()
        output = tmp_path / "out"
        summary = score(inputs, output)
        ((count, example),) = summary.report.causes.most_common()
        assert count == 3
        assert f"{tmp_path}/1.jsonl line 2: " in example
        assert [json.loads(line)["row"] for line in output.read_text().splitlines()] == list(range(6))
        (tmp_path / "10.jsonl").write_text(json.dumps(ROWS[3]) + "\n" + json.dumps(ROWS[7]) + "\n")
        with pytest.raises(ConfigError, match="is the output of a run with another input"):
            score(inputs, output, retry_failed=True)
        with pytest.raises(ConfigError, match="the output would overwrite the input"):
            score(inputs, tmp_path / "2.jsonl", restart=True)


def test_several_inputs_of_different_formats_are_written_to_parquet(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.json").write_text(json.dumps([{"solution_str": "x", "step": 3}]))
    with Inputs.open([str(tmp_path / "a.jsonl"), str(tmp_path / "b.json")]) as inputs:
        score(inputs, tmp_path / "out.parquet")
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["step"] for row in table] == [None] * 12 + [3]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["none*.jsonl"], "no file matches none"),
        (["none.jsonl"], "no such file: none.jsonl"),
        (["-", "none.jsonl"], "must be the only input"),
    ],
)
def test_inputs_that_cannot_be_read_are_refused(names, message):
    with pytest.raises(ConfigError, match=message), Inputs.open(names):
        pass


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path):
    (tmp_path / "step[1].jsonl").write_bytes(LINES)
    with Inputs.open([str(tmp_path / "step[1].jsonl")]) as inputs:
        assert inputs.count() == 12


@pytest.mark.parametrize(
    "data", [LINES, gzip.compress(LINES), json.dumps(ROWS).encode()], ids=["lines", "gzip", "array"]
)
def test_standard_input_is_read_and_identified_by_its_content(stdin, data):
    identities = []
    for given in (data, data):
        stdin(given)
        with Inputs.open(["-"]) as inputs:
            (copy,) = inputs.paths
            assert texts(inputs.rows()) == [str(i) for i in range(12)]
            assert inputs.default_output() is None
            identities.append(inputs.identity())
        assert not copy.exists()
    stdin(LINES + LINES)
    with Inputs.open(["-"]) as inputs:
        assert identities[0] == identities[1] != inputs.identity()
