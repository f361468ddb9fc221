import asyncio
import json
import math
import os
import resource
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reward_loop
from reward_loop import (
    BudgetSpentError,
    ConfigError,
    NaiveRewardLoopManager,
    RewardFunctionError,
    RewardLoopError,
    RewardSample,
    TooManyFailuresError,
    load_function,
)
from reward_loop.client import chat_complete
from reward_loop.managers import GroupRewardLoopManager
from reward_loop.offline.inputs import Fields, Inputs, Row, check_fields
from reward_loop.offline.report_command import summary_of
from reward_loop.offline.score import ScoredFolder, check_export, score_rows, write_scores
from reward_loop.records.reader import RecordsReader
from tests.support.gsm8k import DATA, ROOT, needs_gsm8k
from tests.verl.away import judge_that_goes_away


def exact(solution_str, ground_truth):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}


def write_jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read_jsonl(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is no strict JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@dataclass
class Scored:
    """The results of a run."""

    rows: list
    """The rows of the input with their scores."""
    resumed: int
    folder: Path

    @cached_property
    def report(self):
        return summary_of(self.folder)

    @property
    def outcomes(self):
        return {name: count for name, count in self.report["outcomes"].items() if count}

    @property
    def mean(self):
        return self.report["reward"]["mean"]


def score(
    source,
    output,
    function=exact,
    *,
    manager=None,
    fields=None,
    config=None,
    identity=None,
    **kwargs,
):
    """Score a file as the command does; ``output`` is the folder of the records."""
    if manager is None:
        options = {**(config or {}), "log_dir": str(output)}
        manager = NaiveRewardLoopManager(config=options, compute_score=function)
    fields = fields or Fields(requires=getattr(manager, "requires", frozenset()))
    inputs = source if isinstance(source, Inputs) else Inputs(source)
    check_fields(inputs.rows(), str(inputs.path), fields)
    identity = {"input": inputs.identity(), **(identity or {})}
    with ScoredFolder.open(output, identity) as folder:
        resumed = score_rows(inputs, folder, manager, fields=fields, **kwargs)
        exported = output.with_name(f"{output.name}.jsonl")
        write_scores(inputs, folder, exported)
    return Scored(read_jsonl(exported), resumed, output)


ROWS = [{"solution_str": str(i), "ground_truth": str(i - i % 3), "id": f"q{i}"} for i in range(12)]


def test_every_row_has_a_record_and_is_exported_in_order_with_its_columns(tmp_path):
    source, output = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out"
    progress = []
    done = score(source, output, concurrency=5, on_row=lambda done, reward: progress.append(done))
    assert [row["id"] for row in done.rows] == [row["id"] for row in ROWS]
    assert [row["score"] for row in done.rows] == [1.0, 0.0, 0.0] * 4
    assert all(row["outcome"] == "scored" and row["error"] is None for row in done.rows)
    assert done.rows[10]["components"]["length"] == 2
    assert progress == list(range(13))
    assert (done.report["samples"], done.mean, done.resumed) == (12, pytest.approx(1 / 3), 0)
    assert {row["uid"] for row in RecordsReader(output).rows()} == {f"line {i + 1}" for i in range(12)}
    assert {path.suffix for path in output.rglob("*") if path.is_file()} == {".json", ".jsonl"}


def test_bad_rows_are_failed_rows(tmp_path):
    rows = [
        ROWS[0],
        '{"solution_str": "torn',
        "",
        "[1, 2]",
        {"ground_truth": "1"},
        {"solution_str": "1"},
        {"solution_str": None, "ground_truth": "1"},
        {"solution_str": "1", "ground_truth": "1", "extra_info": [1]},
        {"solution_str": "", "ground_truth": ""},
        '{"solution_str": "1", "ground_truth": "1", "other": ' + "[" * 600 + "]" * 600 + "}",
        '{"solution_str": "1", "ground_truth": "1", "other": ' + "[" * 6000 + "]" * 6000 + "}",
    ]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    done = score(source, tmp_path / "out")
    assert len(done.rows) == 10
    errors = [row["error"] for row in done.rows]
    assert errors[0] is None
    assert "line 2: not JSON" in errors[1]
    assert "line 4: expected a JSON object with named fields, got [1, 2]" in errors[2]
    assert "line 5: no field 'solution_str' (for solution_str). Its fields are ground_truth" in errors[3]
    assert "line 6: no field 'ground_truth'" in errors[4]
    assert "line 7: field 'solution_str' has no value" in errors[5]
    assert "line 8: field 'extra_info' is [1], not a valid extra_info" in errors[6]
    assert done.rows[7]["score"] == 1.0
    assert done.rows[8]["score"] == 1.0
    assert "line 11: not JSON" in errors[9]
    assert "nested too deeply" in errors[9]
    assert [row["score"] for row in (*done.rows[1:7], done.rows[9])] == [None] * 7
    assert done.outcomes == {"scored": 3, "failed": 7}
    assert sum(cause["count"] for cause in done.report["causes"]) == 7


def test_unscored_failed_and_not_finite(tmp_path):
    def function(solution_str):
        return {"none": None, "nan": math.nan, "extra": {"score": 1, "x": math.inf, 3: {1}}}[solution_str]

    source = write_jsonl(tmp_path / "in.jsonl", [{"solution_str": s} for s in ("none", "nan", "extra", "other")])
    scored = score(source, tmp_path / "out", function).rows
    assert [row["outcome"] for row in scored] == ["unscored", "failed", "scored", "failed"]
    assert [row["score"] for row in scored] == [None, None, 1.0, None]
    assert "not finite" in scored[1]["error"]
    assert "KeyError: 'other'" in scored[3]["error"]
    assert scored[2]["components"] == {"score": 1, "x": None, "3": [1]}


def test_fields():
    row = Row("line 1", {"a": {"b": ["x", "y"]}, "c.d": "z", "ground_truth": 3, "extra_info": {"k": 1}, "n": 7})
    fields = Fields({"solution_str": "a.b.1", "data_source": "c.d", "extra_info.n": "n"})
    assert fields.to_sample(row) == RewardSample("y", "z", 3, {"k": 1, "n": 7}, "line 1")
    assert row.columns["extra_info"] == {"k": 1}
    assert (
        "no field 'a.c' (for ground_truth)"
        in Fields({"solution_str": "c.d", "ground_truth": "a.c"}).to_sample(row).error
    )
    with pytest.raises(ConfigError, match=r"no part 'solution'; did you mean 'solution_str'\?"):
        Fields({"solution": "x"})


def test_prompt_group_and_step_are_recorded(tmp_path):
    rows = [
        {"solution_str": "1", "prompt": "1=?", "uid": "a", "step": 3},
        {"solution_str": "1", "prompt": "2=?", "uid": "b", "group": "g", "step": "late"},
    ]
    output = tmp_path / "out"
    score(write_jsonl(tmp_path / "in.jsonl", rows), output, lambda solution_str: 1.0)
    reader = RecordsReader(output)
    found = {row["uid"]: (row["group"], row["step"], reader.text(row)["prompt"]) for row in reader.rows()}
    assert found == {"line 1": ("a", 3, "1=?"), "line 2": ("g", None, "2=?")}
    renamed = Fields({"prompt": "question", "group": "problem.id", "global_steps": "n"})
    sample = renamed.to_sample(Row("line 1", {"solution_str": "1", "question": "Why?", "problem": {"id": 7}, "n": 4}))
    assert (sample.prompt, sample.group, sample.step) == ("Why?", "7", 4)


def test_a_mapped_key_of_extra_info_makes_the_whole_field_optional():
    row = Row("line 1", {"solution_str": "x", "question": "Why?"})
    fields = Fields({"extra_info.question": "question"}, requires=frozenset({"extra_info"}))
    assert fields.to_sample(row) == RewardSample("x", extra_info={"question": "Why?"}, uid="line 1")
    error = Fields(requires=frozenset({"extra_info"})).to_sample(row).error
    assert "no field 'extra_info'" in error
    assert "--field extra_info=..." in error
    both = Fields({"extra_info.question": "question", "extra_info": "meta"})
    assert "no field 'meta' (for extra_info)" in both.to_sample(row).error


def test_columns_that_have_our_names_are_kept(tmp_path):
    rows = [{**ROWS[0], "score": "old", "outcome": 99}]
    (row,) = score(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out").rows
    assert (row["score"], row["input_score"]) == (1.0, "old")
    assert (row["outcome"], row["input_outcome"]) == ("scored", 99)


def test_a_function_that_changes_the_working_directory(tmp_path, monkeypatch):
    def moves(solution_str):
        os.chdir("/")
        return 1.0

    monkeypatch.chdir(tmp_path)
    source = write_jsonl(Path("in.jsonl"), ROWS)
    assert score(source, Path("out"), moves).outcomes == {"scored": 12}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out", "out.jsonl"]


def test_a_manager_of_the_user_is_recorded(tmp_path):
    class Manager:
        async def run_single(self, sample):
            score = {"0": math.nan, "1": "high"}.get(sample.solution_str, 1.0)
            return {"reward_score": score, "reward_extra_info": {"words": 3}}

    class Clipped(NaiveRewardLoopManager):
        def to_reward(self, result):
            reward = super().to_reward(result)
            return {**reward, "reward_score": min(reward["reward_score"], 0.5)}

    source = write_jsonl(tmp_path / "in.jsonl", ROWS[:3])
    done = score(source, tmp_path / "out", manager=Manager())
    assert done.outcomes == {"failed": 2, "scored": 1}
    errors = [row["error"] for row in done.rows]
    assert errors[0] == "sample line 1: the manager returned the score nan, which is not a finite number"
    assert "returned the score 'high'" in errors[1]
    assert done.rows[2]["components"] == {"words": 3}
    clipped = Clipped({"log_dir": str(tmp_path / "clipped")}, compute_score=exact)
    done = score(source, tmp_path / "clipped", manager=clipped)
    assert [row["score"] for row in done.rows] == [0.5, 0.0, 0.0]
    assert done.report["samples"] == 3


class Calls:
    """A reward function that counts its calls, and stops the run at one of them."""

    def __init__(self, stop_at=None):
        self.calls = Counter()
        self.stop_at = stop_at

    async def compute_score(self, solution_str, ground_truth):
        if self.stop_at is not None and self.calls.total() == self.stop_at:
            raise KeyboardInterrupt
        self.calls[solution_str] += 1
        return exact(solution_str, ground_truth)


@pytest.mark.parametrize("stop_at", [0, 1, 5, 11])
def test_an_interrupted_run_is_resumed(tmp_path, stop_at):
    source, output = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out"
    calls = Calls(stop_at)
    with pytest.raises(KeyboardInterrupt):
        score(source, output, calls, concurrency=1)
    calls.stop_at = None
    done = score(source, output, calls, concurrency=1)
    assert done.resumed == stop_at
    assert set(calls.calls.values()) == {1}
    assert done.rows == score(source, tmp_path / "expected").rows
    assert score(source, output, again := Calls()).resumed == 12
    assert not again.calls


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A source, its rows with scores, and the file of its records."""
    folder = tmp_path_factory.mktemp("finished")
    source = write_jsonl(folder / "in.jsonl", ROWS)
    done = score(source, folder / "out", concurrency=1)
    (records,) = (folder / "out").glob("*.jsonl")
    return source, done.rows, records


@settings(deadline=None, max_examples=40)
@given(share=st.floats(0, 1), garbage=st.sampled_from([b"", b'{"uid": 1', b"\x00\x00", b"\n"]))
def test_records_cut_at_any_byte_give_the_same_scores(finished, share, garbage):
    source, expected, records = finished
    whole = records.read_bytes()
    folder = records.parent
    kept = whole[: round(share * len(whole))]
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    (copy / records.name).write_bytes(kept + garbage)
    calls = Calls()
    done = score(source, copy, calls, concurrency=4)
    assert done.rows == expected
    # A row is called again only if its record was cut.
    ends = kept.count(b"\n") + (garbage == b"\n" and kept[-1:] == b"}" and whole[len(kept) : len(kept) + 1] == b"\n")
    assert (done.resumed, calls.calls.total()) == (ends, len(ROWS) - ends)


def test_a_file_system_that_refuses_records_stops_the_run_and_loses_nothing(tmp_path):
    source, output = write_jsonl(tmp_path / "in.jsonl", ROWS * 200), tmp_path / "out"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*out/"):
            score(source, output, concurrency=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    before = {row["uid"] for row in RecordsReader(output).rows()}
    assert 0 < len(before) < 2400
    done = score(source, output)
    assert (done.resumed, len(done.rows), done.report["samples"]) == (len(before), 2400, 2400)


@pytest.mark.parametrize("change", ["input", "function"])
def test_another_run_is_not_continued(tmp_path, change):
    source, output = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        score(source, output, Calls(3), identity={"function": "a"}, concurrency=1)
    if change == "input":
        write_jsonl(source, ROWS[:-1])
    identity = {"function": "b" if change == "function" else "a"}
    with pytest.raises(ConfigError, match=f"out has the records of a run with another {change}: choose"):
        score(source, output, identity=identity)


def test_a_folder_that_another_program_wrote_is_left_as_it_is(tmp_path):
    source, output = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out"
    output.mkdir()
    (output / "notes.jsonl").write_text('{"precious": 1}\n')
    with pytest.raises(ConfigError, match=r"out was not written by this command: choose another --output"):
        score(source, output)
    assert (output / "notes.jsonl").read_text() == '{"precious": 1}\n'
    run = tmp_path / "run"
    score_run(run)  # records of a training run
    with pytest.raises(ConfigError, match="run was not written by this command"):
        score(source, run)


def score_run(folder):
    manager = NaiveRewardLoopManager({"log_dir": str(folder)}, compute_score=lambda solution_str: 1.0)
    asyncio.run(manager.run_single(RewardSample("x", uid="x")))
    manager.close()


def test_two_runs_at_once_are_refused(tmp_path):
    source, output = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out"
    with ScoredFolder.open(output, {}), pytest.raises(ConfigError, match="another run is writing"):
        score(source, output)


@pytest.mark.parametrize("file", ["in.jsonl", "folder/out.jsonl", "out.csv", "a_folder.jsonl"])
def test_a_file_that_cannot_be_exported_is_refused(tmp_path, file):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    score_run(tmp_path / "folder")
    (tmp_path / "a_folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match=rf"--export .*{file}: name a JSONL file"):
        check_export(Inputs(tmp_path / "folder" if "folder/" in file else source), tmp_path / file)


def raises(solution_str):
    raise KeyError("rubric")


def test_too_many_failures_and_the_policy_raise_stop_a_run(tmp_path):
    source, output = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out"
    with pytest.raises(TooManyFailuresError, match=r"KeyError: 'rubric'"):
        score(source, output, raises, config={"min_samples_for_failed_share": 6}, concurrency=1)
    with pytest.raises(RewardFunctionError, match="line 1"):
        score(source, output, raises, config={"on_failed": "raise"}, concurrency=1)

    class Broken:
        async def run_single(self, sample):
            return sample.batch

    with pytest.raises(RewardLoopError, match=r"line 1: Broken.run_single raised AttributeError"):
        score(source, output, manager=Broken())


def test_a_missing_api_key_stops_the_run_before_a_row_fails(tmp_path, monkeypatch):
    monkeypatch.delenv("THE_KEY", raising=False)

    async def judged(solution_str):
        await chat_complete("http://127.0.0.1:9", "?", api_key_env="THE_KEY")

    source, output = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out"
    with pytest.raises(ConfigError, match=r"sample line \d+: .*judged.* the environment variable THE_KEY"):
        score(source, output, judged)
    assert score(source, output).resumed == 0


def fails_for(*failing):
    """A function that fails for these responses, and counts its calls."""

    def judge(solution_str):
        calls[solution_str] += 1
        if solution_str in failing:
            raise ConnectionError("judge is down")
        return 1

    calls = judge.calls = Counter()
    return judge


def test_rows_wait_while_the_judge_is_away(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    with judge_that_goes_away(after=4, seconds=1.0) as address:

        async def judge(solution_str):
            return float((await chat_complete(address, solution_str)).text)

        done = score(source, tmp_path / "out", judge)
    assert (done.outcomes, done.report["samples"]) == ({"scored": 12}, 12)
    assert any(row.get("outage_s", 0) > 0.5 for row in RecordsReader(tmp_path / "out").rows())


def test_failed_rows_of_a_finished_run_are_scored_again(tmp_path):
    source, output = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out"
    config = {"retry": {"max_attempts": 1}}
    score(source, output, fails_for("3", "7"), config=config)
    done = score(source, output, again := fails_for("7"), config=config)
    assert (done.outcomes, done.resumed) == ({"scored": 11, "failed": 1}, 10)
    done = score(source, output, last := fails_for(), config=config)
    # A row has one record, that of its last call.
    assert (done.outcomes, done.report["samples"]) == ({"scored": 12}, 12)
    assert (set(again.calls), set(last.calls)) == ({"3", "7"}, {"7"})
    assert [(row["id"], row["score"], row["error"]) for row in done.rows] == [(f"q{i}", 1.0, None) for i in range(12)]


@pytest.mark.parametrize("at_cap", ["stop", "default", "mask"])
def test_rows_that_the_budget_left_out_are_scored_by_the_next_run(tmp_path, at_cap):
    source, output = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out"
    calls = []

    async def judge(solution_str):
        async with reward_loop.limit("judge") as lease:
            calls.append(solution_str)
            lease.used(cost=1)
        return None if solution_str == "0" else 1

    limits = {"limits": {"judge": {"max_concurrent": 1}}}
    budget = {"budget": {"max_cost": 3, "at_cap": at_cap}}
    with pytest.raises(BudgetSpentError) if at_cap == "stop" else nullcontext():
        score(source, output, judge, config={**limits, **budget})
    assert len(calls) == 3
    done = score(source, output, judge, config=limits)
    assert (done.outcomes, done.resumed, len(calls)) == ({"scored": 11, "unscored": 1}, 3, 12)
    assert (done.report["over_budget"], done.report["stopped"]) == (0, 0)


def test_a_run_without_results_starts_over_with_another_function(tmp_path):
    source, output = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out"
    with pytest.raises(TooManyFailuresError):
        score(source, output, raises, config={"min_samples_for_failed_share": 6}, identity={"function": "a"})
    # Every row that ended had failed: the corrected function starts over.
    done = score(source, output, exact, identity={"function": "b"})
    assert (done.resumed, done.outcomes) == (0, {"scored": 12})


def test_a_mapping_that_fits_no_row_is_an_error_and_leaves_nothing_behind(tmp_path):
    source, output = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out"
    with pytest.raises(ConfigError, match=r"none of the 12 rows.*line 1: no field 'gt' \(for ground_truth\)"):
        score(source, output, fields=Fields({"ground_truth": "gt"}))
    assert not output.exists()


def ranks(solution_strs):
    seen.append(sorted(solution_strs))
    return [float(sorted(solution_strs).index(text)) for text in solution_strs]


seen = []


def test_rows_of_a_group_are_scored_together(tmp_path):
    # The rows of the groups are mixed, and one row cannot be scored.
    rows = [{"solution_str": f"{i}", "uid": f"g{i % 3}"} for i in range(9)] + [{"uid": "g0"}]
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out"
    manager = GroupRewardLoopManager({"log_dir": str(output)}, compute_score=ranks)
    seen.clear()
    done = score(source, output, manager=manager, concurrency=1)
    assert [row["score"] for row in done.rows] == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, None]
    assert sorted(seen) == [["0", "3", "6"], ["1", "4", "7"], ["2", "5", "8"]]
    assert "line 10: no field 'solution_str'" in done.rows[9]["error"]
    # A group that lacks a record is scored as a whole.
    with ScoredFolder.open(output, {"input": Inputs(source).identity()}) as folder:
        folder.forget({"line 2"})
    seen.clear()
    again = score(source, output, manager=manager)
    assert (again.rows, again.resumed, again.report["samples"], seen) == (done.rows, 6, 10, [["1", "4", "7"]])
    alone = write_jsonl(tmp_path / "alone.jsonl", [{"solution_str": "1"}])
    with pytest.raises(ConfigError, match=r"line 1 has no field `group` or `uid`.*--field group="):
        score(alone, tmp_path / "alone", manager=manager)


def test_parquet(tmp_path):
    rows = [{"output": row["solution_str"], "reward_model": {"ground_truth": row["ground_truth"]}} for row in ROWS]
    source = tmp_path / "in.parquet"
    frame = write_jsonl(tmp_path / "rows.jsonl", rows)
    duckdb.execute(f"COPY (FROM read_json('{frame}')) TO '{source}'")
    fields = Fields({"solution_str": "output", "ground_truth": "reward_model.ground_truth"})
    done = score(source, tmp_path / "out", fields=fields)
    assert done.mean == pytest.approx(1 / 3)
    assert done.rows[1]["reward_model"] == {"ground_truth": "0"}
    assert [row["output"] for row in done.rows] == [row["output"] for row in rows]
    count = 2 * 1024 + 5  # more than a batch
    duckdb.execute(f"COPY (SELECT '1' AS solution_str, '1' AS ground_truth FROM range({count})) TO '{source}'")
    assert len(score(source, tmp_path / "many").rows) == count


@needs_gsm8k
@pytest.mark.parametrize(
    ("model", "correct"),
    [("6b_finetuning", 146), ("6b_verification", 266), ("175b_finetuning", 225), ("175b_verification", 371)],
)
def test_gsm8k_solutions_get_the_published_verdicts(tmp_path, model, correct):
    function = load_function(str(ROOT / "examples" / "gsm8k" / "reward.py"))
    fields = Fields({"solution_str": f"{model}.solution"}, requires=frozenset({"ground_truth"}))
    done = score(DATA / "model_solutions.jsonl", tmp_path / "out", function, fields=fields)
    assert done.outcomes == {"scored": 660}
    assert done.mean == correct / 660
    assert [row for row in done.rows if row["score"] != row[model]["is_correct"]] == []
