"""What ``reward_loop.check=True`` finds in the data before a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from reward_loop.errors import ConfigError
from reward_loop.verl.data_check import check_data
from tests.verl.configs import resolved

pytestmark = pytest.mark.integration  # imports verl and datasets

ROW = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1+2="}],
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"index": 0},
}
FUNCTION = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n"
JUDGE = """
class Judge:
    def __init__(self):
        raise RuntimeError("no GPU here")
    async def compute_score(self, solution_str, ground_truth, extra_info):
        return float(extra_info["hint"] == ground_truth) / extra_info["num_turns"]
"""


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in ROW.items() if name not in names}


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pd.DataFrame(list(rows)).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def said(folder: Path, *overrides: str, function: str | None = FUNCTION, train: str | None = None) -> list[str]:
    """What the check says; validation is done on a good file."""
    if function is not None:
        (folder / "reward.py").write_text(function)
        overrides = (f"reward.custom_reward_function.path={folder}/reward.py", *overrides)
    val = write(folder / "val.jsonl", [ROW if function is not None else {**ROW, "data_source": "openai/gsm8k"}])
    lines: list[str] = []
    check_data(resolved(f"data.train_files={train}", f"data.val_files={val}", *overrides), lines.append)
    return lines


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_data_with_all_columns_passes(tmp_path: Path, suffix: str) -> None:
    lines = said(tmp_path, train=write(tmp_path / f"train{suffix}", [ROW] * 3))
    assert [line.partition("=")[0] for line in lines] == ["Reading data.train_files", "Reading data.val_files"]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([without("data_source")], r"row 0: .*reward\.py:compute_score requires the column data_source"),
        ([ROW, {**ROW, "reward_model": {"style": "rule"}}], r"requires reward_model\.ground_truth"),
        ([without("reward_model")], r"requires reward_model\.ground_truth"),
        ([without("prompt")], "no column 'prompt' with the prompt.*data.prompt_key"),
        ([{**ROW, "extra_info": "none"}], "the column extra_info must be an object"),
        ([], "has no rows"),
    ],
)
def test_rows_without_what_the_function_requires_are_named(tmp_path: Path, rows: Any, problem: str) -> None:
    train = tmp_path / "train.jsonl"
    write(train, rows)
    with pytest.raises(ConfigError, match=problem) as caught:
        said(tmp_path, train=str(train))
    assert f"data.train_files={train}" in str(caught.value)


def test_data_sources_that_no_component_scores_are_named(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [*[ROW] * 9, {**ROW, "data_source": "essays"}])
    (tmp_path / "form.py").write_text("def form(solution_str): return 1.0\n")
    options = (
        "reward_model.reward_manager=composite",
        f"+reward_loop.components.sums.path={tmp_path}/form.py:form",
        "+reward_loop.components.sums.data_sources=[sum*]",
        "+reward_loop.components.sums.phase=train",
    )
    with pytest.raises(ConfigError) as caught:
        said(tmp_path, *options, function=None, train=train)
    assert "scores 1 data source: 'essays'. Add a component" in str(caught.value)
    assert "data.val_files" in str(caught.value), "no component scores a validation"
    # Verl's function scores all sources, and has none for the last one: both checks read all rows.
    form = f"+reward_loop.components.form.path={tmp_path}/form.py:form"
    rows = [*[{**ROW, "data_source": "openai/gsm8k"}] * 9, {**ROW, "data_source": "essays"}]
    train = write(tmp_path / "verls.jsonl", rows)
    with pytest.raises(ConfigError, match="no function for 1 data source: 'essays'"):
        said(tmp_path, options[0], form, "+reward_loop.components.verls.weight=1", function=None, train=train)
    train = write(tmp_path / "train.jsonl", [*[ROW] * 9, {**ROW, "data_source": "essays"}])
    fixed = ("+reward_loop.components.sums.phase=null", "+reward_loop.components.sums.data_sources=null")
    assert len(said(tmp_path, *options[:2], *fixed, function=None, train=train)) == 2


def test_a_component_of_one_phase_is_compared_with_the_rows_of_that_phase(tmp_path: Path) -> None:
    (tmp_path / "form.py").write_text("def form(solution_str, ground_truth): return 1.0\n")
    options = ("reward_model.reward_manager=composite", f"+reward_loop.components.sums.path={tmp_path}/form.py:form")
    train = write(tmp_path / "train.parquet", [without("reward_model")])
    other = f"+reward_loop.components.length.path={tmp_path}/length.py:length"
    (tmp_path / "length.py").write_text("def length(solution_str): return 1.0\n")
    phase = "+reward_loop.components.sums.phase="
    said(tmp_path, *options, other, f"{phase}validate", function=None, train=train)
    with pytest.raises(ConfigError, match=r"train_files=.*components\.sums requires"):
        said(tmp_path, *options, other, f"{phase}train", function=None, train=train)


def test_every_file_is_opened_and_all_problems_are_listed(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    (tmp_path / "broken.jsonl").write_text('{"a": \n')
    (tmp_path / "rows.csv").write_text("a,b\n")
    names = ["broken.parquet", "broken.jsonl", "rows.csv", "brokn.jsonl", "val.jsonl"]
    with pytest.raises(ConfigError) as caught:
        said(tmp_path, train=f"[{','.join(f'{tmp_path}/{name}' for name in names)}]")
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert "cannot be read as parquet" in lines[0]
    assert "cannot be read as json" in lines[1]
    assert "verl reads files that end in .json, .jsonl, .parquet" in lines[2]
    assert "no such file; did you mean 'broken.jsonl'" in lines[3]


def test_a_validation_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [ROW])
    with pytest.raises(ConfigError, match=r"data\.val_files=.*nowhere\.parquet: no such file"):
        said(tmp_path, f"data.val_files={tmp_path}/nowhere.parquet", train=train)


def test_a_class_is_not_created_and_keys_that_it_reads_are_noted(tmp_path: Path) -> None:
    name = "reward.custom_reward_function.name=Judge"
    train = write(tmp_path / "train.parquet", [{**ROW, "extra_info": {"hint": "3"}}, ROW])
    lines = said(tmp_path, name, function=JUDGE, train=train)
    assert any("reads extra_info[...] of hint, which rows of" in line for line in lines)
    with pytest.raises(ConfigError, match=r"reward\.py:Judge requires reward_model\.ground_truth"):
        said(tmp_path, name, function=JUDGE, train=write(tmp_path / "train.parquet", [without("reward_model")]))


def test_sources_without_a_function_of_verl_need_the_option_of_a_function(tmp_path: Path) -> None:
    known = [{**ROW, "data_source": "openai/gsm8k"}] * 20
    assert len(said(tmp_path, function=None, train=write(tmp_path / "known.parquet", known))) == 2
    rows = [*known, *({**ROW, "data_source": source} for source in ("codecontests", "aime_x", "mine", "other"))]
    train = write(tmp_path / "train.parquet", rows)
    problem = r"no function for 2 data sources: 'mine', 'other'\. Set reward\.custom_reward_function\.path"
    with pytest.raises(ConfigError, match=problem):
        said(tmp_path, function=None, train=train)
    with pytest.raises(ConfigError, match="verl's function for the data source requires the column data_source"):
        said(tmp_path, function=None, train=write(tmp_path / "none.parquet", [without("data_source")]))


def test_what_another_class_or_file_system_reads_is_said_not_to_be_checked(tmp_path: Path) -> None:
    (line, _) = said(tmp_path, train="hdfs://a/train.parquet")
    assert "not opened" in line
    (line,) = said(tmp_path, "data.custom_cls.path=mine.py", train="nowhere")
    assert "data.custom_cls.path=mine.py reads it" in line
