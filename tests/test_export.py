"""`reward-loop export`: verl's keys in JSON Lines, and transcripts with the columns that Inspect Scout documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reward_loop.cli import app
from reward_loop.offline.export import COLUMNS
from reward_loop.offline.inputs import Inputs
from reward_loop.offline.notes import Notes
from reward_loop.records import Records
from reward_loop.records.reader import RecordsReader
from tests.view.recorded import exchange, flushed, record, revise

SCHEMA = {
    **dict.fromkeys(("transcript_id", "source_type", "source_id", "source_uri", "date"), "string"),
    **dict.fromkeys(("task_set", "task_id", "agent", "agent_args", "model", "model_options"), "string"),
    "task_repeat": "int64",
    "message_count": "int64",
    "total_tokens": "int64",
    "total_time": "double",
    "success": "bool",
    "trust_content": "bool",
    **dict.fromkeys(("score", "score_explanation", "error", "limit"), "string"),
    **dict.fromkeys(("messages", "events", "timelines", "events_data"), "string"),
}
"""The columns of a transcript database: https://meridianlabs-ai.github.io/inspect_scout/db_schema.html (0.6.1)."""

ROLLOUT = (
    "<think>\nI look.\n</think>\n\n"
    '<tool_call>\n{"name": "run", "arguments": {"code": "1 + 1"}}\n</tool_call>\n'
    "<tool_call>\n{broken\n</tool_call>\n"
    "user\n<tool_response>\n2\n</tool_response>\nassistant\nIt is 2."
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "rewards"
    writer = Records(path)
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    names: dict[str, Any] = {"step": 1, "group": "g", "data_source": "math", "ground_truth": 2}
    record(writer, "a", 0.5, response=ROLLOUT, prompt=prompt, components={"acc": 1.0}, exchanges=[exchange(7)], **names)
    record(writer, "b", None, step=2, response="no \ud800 idea")
    record(writer, "c", 1.0, step=3, full=0.0)
    revise(writer, "a", 0.25)
    flushed(writer)
    (row,) = RecordsReader(path).rows(uid="a")
    Notes(path).write(row["id"], "a", 1, "look again")
    return path


def export(folder: Path, file: str, *options: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["export", str(folder), "-o", str(folder.parent / file), *options])
    assert done.exit_code == status, done.output
    assert not list(folder.parent.glob(".partial-*"))
    return " ".join(done.output.split())


def test_lines_have_the_keys_of_verls_dumps(folder: Path) -> None:
    assert "2 rollouts" in (said := export(folder, "dumps/1.jsonl"))
    assert "1 sample without texts left out" in said
    first, second = (json.loads(line) for line in (folder.parent / "dumps" / "1.jsonl").open())
    expected = {"step": 1, "output": ROLLOUT, "gts": 2, "score": 0.25, "acc": 1.0, "uid": "a", "note": "look again"}
    assert first | expected == first
    assert first["input"] == "system\nBe brief.\nuser\n1 + 1?"
    assert (second["score"], second["outcome"], second["note"]) == (None, "failed", None)
    read, _ = Inputs.open([str(folder.parent / "dumps")]).rows()
    assert (read.columns["solution_str"], read.columns["ground_truth"]) == (ROLLOUT, 2)


def test_transcripts_have_the_documented_columns(folder: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    export(folder, "run.parquet", "--step", "1-2")
    table = parquet.read_table(folder.parent / "run.parquet")
    types = {field.name: str(field.type) for field in table.schema}
    assert types == COLUMNS
    assert {name: kind for name, kind in types.items() if name in SCHEMA} == {
        name: SCHEMA[name] for name in COLUMNS if name in SCHEMA
    }
    first, second = table.to_pylist()
    assert (first["score"], first["note"], first["task_id"], first["task_set"]) == ("0.25", "look again", "g", "math")
    assert first["score_explanation"] == "Let me see. Score: 7"
    assert (second["error"], second["score"], second["ground_truth"]) == ("it failed", None, None)
    system, user, call, result, end = json.loads(first["messages"])
    assert first["message_count"] == 5
    assert ((system["role"], system["content"]), user["content"]) == (("system", "Be brief."), "1 + 1?")
    assert call["content"] == [{"type": "reasoning", "reasoning": "I look."}]
    good, bad = call["tool_calls"]
    assert (good["function"], good["arguments"]) == ("run", {"code": "1 + 1"})
    assert (bad["function"], bad["arguments"], bad["parse_error"]) == ("unknown", {}, "{broken")
    assert {**result, "id": None} == {
        "role": "tool",
        "content": "2",
        "tool_call_id": good["id"],
        "function": "run",
        "id": None,
    }
    assert (end["role"], end["content"]) == ("assistant", "It is 2.")
    assert len({message["id"] for message in (system, user, call, result, end)}) == 5


@pytest.mark.parametrize(
    ("file", "options", "said"),
    [
        ("rewards/run.jsonl", (), "must not be in the folder of records"),
        ("run.csv", (), "JSON Lines (.jsonl) or parquet (.parquet)"),
        ("run.jsonl", ("--step", "x"), "a step or a range of steps"),
        ("run.jsonl", ("--step", "3"), "no samples with recorded texts in step 3"),
        ("run.parquet", ("--step", "9"), "no samples with recorded texts in step 9"),
    ],
)
def test_what_cannot_be_exported_is_an_error(folder: Path, file: str, options: tuple[str, ...], said: str) -> None:
    assert said in export(folder, file, *options, status=2)
    assert not (folder.parent / file).exists()
