"""The index agrees with the records, also while processes write them, after kill -9, and with damaged files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from reward_loop.errors import ConfigError
from reward_loop.index import index as module
from reward_loop.index.filters import SampleFilter
from reward_loop.index.index import CURSORS, Index, IndexFailedError, open_index
from reward_loop.index.questions import run, steps
from reward_loop.records import Records, resumed_row
from reward_loop.view import app
from reward_loop.view.app import Follower
from tests.records.rows import sample, write
from tests.support.counted import rows_that_count
from tests.support.recorded import OtherProcess, exchange, flushed, record


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rewards"


@pytest.fixture
def writer(folder: Path) -> Records:
    """The writer of a folder with one sample, ``a``."""
    writer = Records(folder)
    record(writer, "a")
    return flushed(writer)


def build(folder: Path) -> None:
    """Build the index of a folder, as a first start of the viewer does."""
    with Index(folder) as index:
        index.update()


def rewards(index: Index) -> dict[str, float | None]:
    return {row["uid"]: row["reward"] for row in index.rows("SELECT uid, reward FROM samples")}


def test_what_a_resumed_run_does_again_does_not_count(folder: Path) -> None:
    writer = Records(folder)
    for step, group in ((1, "trained"), (2, "lost"), (3, "kept")):
        record(writer, f"{group}_0", 0.0, step=step, group=group)
    record(writer, "ahead_0", 0.0, step=None, generated_step=1, group="ahead")
    record(writer, "alone_0", 0.0, step=None)
    for step in (0, 1):
        record(writer, f"validated_{step}", 0.0, step=step, validate=True)
    flushed(writer)
    with Index(folder) as index:
        index.update()
        writer.write_rows([resumed_row(1, {"kept"}, validates=True)])
        record(flushed(writer), "again_0", 1.0, step=2, group="again")
        record(writer, "validated_again", 1.0, step=1, validate=True)
        flushed(writer)
        index.update()
        expected = {"trained_0": 0.0, "kept_0": 0.0, "alone_0": 0.0, "again_0": 1.0}
        expected |= {"validated_0": 0.0, "validated_again": 1.0}
        assert rewards(index) == expected
        assert [(step["step"], step["samples"]) for step in steps(index, False)] == [(1, 1), (2, 1), (3, 1), (None, 1)]
        assert {row["uid"]: row["reward"] for row in index.records()} == expected
        assert [row["uid"] for row in index.records(SampleFilter().also("step = 2"))] == ["again_0"]


def test_an_index_that_follows_a_resumed_run_books_its_samples_as_a_new_one_does(folder: Path) -> None:
    """The samples are generated ahead: only their advantages name the step that trains on them."""
    writer = Records(folder)
    for step in range(1, 21):
        record(writer, f"before_{step}", 0.0, step=None, generated_step=step - 1, group=f"before {step}")
        writer.write_advantages(step, {f"before_{step}": 0.5})
    flushed(writer)
    with Index(folder) as index:
        index.update()
        writer.write_rows([resumed_row(10, set())])
        for step in range(11, 15):
            record(writer, f"again_{step}", 1.0, step=None, generated_step=step - 2, group=f"again {step}")
        flushed(writer)
        index.update()
        for step in range(11, 15):
            writer.write_advantages(step, {f"again_{step}": 0.5})
            flushed(writer)
            index.update()
        found = {row["uid"]: row["step"] for row in index.rows("SELECT uid, step FROM samples")}
        assert found == {row["uid"]: row["step"] for row in index.records()}
        with open_index(folder) as new:
            assert found == {row["uid"]: row["step"] for row in new.records()}
    assert found == {f"before_{n}": n for n in range(1, 11)} | {f"again_{n}": n for n in range(11, 15)}


@pytest.mark.processes
def test_following_processes_that_write_and_one_that_is_killed(folder: Path) -> None:
    writers = [OtherProcess(folder, name) for name in ("a", "b")]
    try:
        for writer in writers:
            writer.write(5)
        with Index(folder) as index:
            index.update()
            assert len(rewards(index)) == 10
            before = index.revision
            writers[0].write(7)
            writers[1].kill()
            assert index.update()
            assert len(index.rows("SELECT id FROM samples")) == 17
            assert index.revision > before
            assert not index.update()
            assert index.is_following
    finally:
        for writer in writers:
            writer.kill()


def test_an_incomplete_line_is_read_when_it_is_complete(folder: Path, writer: Records) -> None:
    (path,) = folder.glob("*.jsonl")
    line = path.read_bytes()
    second = line.replace(b'"uid":"a"', b'"uid":"b"')
    with Index(folder) as index:
        index.update()
        with path.open("ab") as file:
            file.write(second[:100])
        assert not index.update()
        assert index.incomplete == 1
        with path.open("ab") as file:
            file.write(second[100:])
        assert index.update()
        assert index.incomplete == 0
        assert set(rewards(index)) == {"a", "b"}


def test_damaged_lines_are_counted_and_left_out(folder: Path, writer: Records) -> None:
    (path,) = folder.glob("*.jsonl")
    with path.open("ab") as file:
        file.write(b'{"version":1,"ki\n\x00\x00\n[1]\n')
    record(writer, "b")
    flushed(writer)
    with Index(folder) as index:
        index.update()
        assert set(rewards(index)) == {"a", "b"}
        assert index.incomplete == 3


def test_lines_that_are_longer_than_a_chunk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 4096)
    writer = Records(folder)
    for number in range(30):
        record(writer, f"s{number}", None, error="x" * (5_000_000 if number == 7 else 300))
    flushed(writer)
    with Index(folder) as index:
        index.update()
        assert len(rewards(index)) == 30
        assert sum(index._unread()) == 0
        (row,) = index.rows("SELECT id, chunk FROM samples WHERE uid = 's7'")
        line = index.line(row["chunk"], id=row["id"])
        assert line is not None
        assert len(line["error"]) == 5_000_000


def many(folder: Path, count: int) -> None:
    """Records of two processes."""
    for name in ("a", "b"):
        writer = Records(folder)
        for number in range(count):
            record(writer, f"{name}{number}", number / 10, error="x" * (number % 7 * 100))
        flushed(writer)


def assert_has_all(index: Index, count: int) -> None:
    """Check that the index has each record once, and finds its line."""
    rows = index.rows("SELECT id, uid, chunk FROM samples")
    assert sorted(row["uid"] for row in rows) == sorted(f"{name}{number}" for name in "ab" for number in range(count))
    for row in rows[::37]:
        line = index.line(row["chunk"], id=row["id"])
        assert line is not None
        assert line["uid"] == row["uid"]
    assert sum(index._unread()) == 0


def test_lines_of_chunks_that_were_loaded_together_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 20_000)
    many(folder, 500)
    with Index(folder) as index:
        assert index.update()
        assert_has_all(index, 500)
        assert index.rows("SELECT count(DISTINCT chunk) > 20 AS many FROM samples") == [{"many": True}]


def test_chunks_are_loaded_one_by_one_if_the_memory_does_not_suffice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from duckdb import OutOfMemoryException

    monkeypatch.setattr(module, "CHUNK", 20_000)
    many(folder, 100)
    load, loaded = module.tables.load, list[int]()

    def load_few(cursor: Any, chunks: Any, *others: Any) -> int:
        loaded.append(len(chunks))
        version = load(cursor, chunks, *others)
        if len(chunks) > 1:
            raise OutOfMemoryException("no memory")
        return version

    monkeypatch.setattr(module.tables, "load", load_few)
    with Index(folder) as index:
        assert index.update()
        assert_has_all(index, 100)
    assert loaded[0] > 1
    assert set(loaded[1:]) == {1}


def test_the_next_start_reads_only_what_is_new(folder: Path, writer: Records) -> None:
    build(folder)
    record(writer, "b")
    flushed(writer)
    with Index(folder) as index:
        assert set(rewards(index)) == {"a"}
        index.update()
        assert set(rewards(index)) == {"a", "b"}


def test_the_index_is_built_again_when_a_file_has_been_replaced(folder: Path, writer: Records) -> None:
    build(folder)
    (path,) = folder.glob("*.jsonl")
    path.unlink()
    record(writer := Records(folder), "b")
    flushed(writer)
    with Index(folder) as index:
        index.update()
        assert set(rewards(index)) == {"b"}


def test_a_damaged_index_is_built_again(folder: Path, writer: Records, cache: Path) -> None:
    build(folder)
    (path,) = cache.rglob("*.duckdb")
    path.write_bytes(b"not a database" * 1000)
    with Index(folder) as index:
        index.update()
        assert set(rewards(index)) == {"a"}


def test_a_second_viewer_of_a_folder_has_an_index_of_its_own(folder: Path, writer: Records, cache: Path) -> None:
    with Index(folder) as first, Index(folder) as second:
        for index in (first, second):
            index.update()
            assert set(rewards(index)) == {"a"}
    assert len(list(cache.rglob("*.duckdb"))) == 1


def test_components_with_types_that_differ_between_rows(folder: Path) -> None:
    writer = Records(folder)
    values = [1.0, True, "text", None, float("nan"), [1, 2], {"a": 1}, 3]
    for number, value in enumerate(values):
        record(writer, f"s{number}", 1.0, components={"c": value, 'odd/"~name': number, "score": 1.0})
    flushed(writer)
    with Index(folder) as index:
        index.update()
        (step,) = steps(index, False)
    assert step["components"]["c"]["mean"] == pytest.approx((1 + 1 + 3) / 3)
    assert step["components"]['odd/"~name']["mean"] == pytest.approx(3.5)
    assert "score" not in step["components"]


def test_summaries_follow_new_rows(folder: Path) -> None:
    writer = Records(folder)
    for number in range(4):
        record(writer, f"s{number}", float(number), group="g", exchanges=[exchange(number)])
    record(writer, "v", 1.0, validate=True)
    flushed(writer)
    with Index(folder) as index:
        index.update()
        (step,) = steps(index, False)
        assert step["reward"]["mean"] == 1.5
        assert step["groups"] == 1
        assert (step["judge_s"]["p50"], step["judge_s"]["p95"]) == (0.5, 0.5)
        record(writer, "s4", None, group="g2", step=2)
        record(writer, "s5", None, group="g2", step=2)
        record(writer, "s6", 4.0, group="g")
        flushed(writer)
        index.update()
        one, two = steps(index, False)
        assert one["reward"]["mean"] == 2.0
        assert (two["outcomes"]["failed"], two["all_failed"], two["reward"]["mean"]) == (2, 1, None)
        found = run(index)
        outcomes = [found[kind]["outcomes"] for kind in ("training", "validation")]
        assert outcomes == [{"scored": 5, "unscored": 0, "failed": 2}, {"scored": 1, "unscored": 0, "failed": 0}]
        assert found["models"] == ["judge-7b"]


def test_records_of_a_newer_version_are_an_error(folder: Path, writer: Records) -> None:
    (path,) = folder.glob("*.jsonl")
    with path.open("a") as file:
        file.write(json.dumps({"version": 99, "kind": "sample", "id": "x"}) + "\n")
    with Index(folder) as index, pytest.raises(ConfigError, match="records of version 99"):
        index.update()


def test_an_index_that_cannot_be_written_is_an_error_that_names_its_directory(
    folder: Path, writer: Records, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Index(folder) as index:
        monkeypatch.setattr(module.tables, "load", lambda cursor, *_: cursor.execute("SELECT * FROM nothing"))
        with pytest.raises(IndexFailedError, match="XDG_CACHE_HOME"):
            index.update()
        monkeypatch.undo()
        assert index.update()  # nothing of the failed transaction is left
        assert rewards(index) == {"a": 1.0}


def test_indexes_that_were_not_used_for_long_are_deleted(folder: Path, writer: Records, cache: Path) -> None:
    build(folder)
    (old,) = cache.rglob("*.lock")
    os.utime(old, (0, 0))
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    with Index(other):
        assert not old.with_suffix(".duckdb").exists()
        assert len(list(cache.rglob("*.duckdb"))) == 1


def test_an_update_ends_while_a_process_keeps_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(writer := Records(folder), "first")
    flushed(writer)
    load = module.tables.load
    with Index(folder) as index:

        def load_while_writing(*arguments: Any) -> int:
            version = load(*arguments)
            record(writer, f"s{index.revision}")
            flushed(writer)
            return version

        monkeypatch.setattr(module.tables, "load", load_while_writing)
        for count in (1, 2, 3):
            assert index.update()
            assert len(rewards(index)) == count


@pytest.fixture
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers look for new rows after 10 ms."""
    monkeypatch.setattr(app, "INTERVAL_S", 0.01)


@pytest.mark.usefixtures("short_interval")
async def test_changes_are_reported_until_it_stops(writer: Records) -> None:
    with Index(writer.path.parent) as index:
        index.update()
        follower = Follower(index)
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
            tasks.create_task(follower.run())
            revisions = follower.revisions(at_least_every_s=60)
            first = await anext(revisions)
            record(writer, "second")
            assert await anext(revisions) > first
            assert len(index.rows("SELECT id FROM samples")) == 2
            waiting = asyncio.ensure_future(anext(revisions, None))
            await follower.stop()
            assert await waiting is None


@pytest.mark.usefixtures("short_interval")
async def test_an_error_is_kept_until_reading_works_again(writer: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    with Index(writer.path.parent) as index:
        index.update()
        follower = Follower(index)
        update, seen, problems = index.update, asyncio.Event(), list[str]()
        loop = asyncio.get_running_loop()

        def fails() -> bool:
            if follower.problem is None:
                raise OSError("the disk is full")
            problems.append(follower.problem)
            loop.call_soon_threadsafe(seen.set)
            return update()

        monkeypatch.setattr(index, "update", fails)
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
            tasks.create_task(follower.run())
            revisions = follower.revisions(at_least_every_s=60)
            await anext(revisions)
            await seen.wait()
            record(writer, "second")
            await anext(revisions)
            assert (problems[0], follower.problem) == ("the disk is full", None)
            await follower.stop()


def test_the_advantage_is_that_of_the_last_row_of_the_sample(tmp_path: Path) -> None:
    one, other = Records(tmp_path), Records(tmp_path)
    one.write(sample("q_0", id="early", time=1.0))
    one.write(sample("q_0", time=2.0, reward=0.5))
    one.write(sample("masked_0"))
    other.write_advantages(1, {"q_0": 0.25, "gone_0": 9.0})
    other.write_advantages(2, {"q_0": -1.5})
    assert one.flush()
    assert other.flush()
    rows = rows_that_count(tmp_path)
    assert [(row["uid"], row["time"], row.get("advantage")) for row in rows] == [
        ("q_0", 1.0, None),
        ("q_0", 2.0, -1.5),
        ("masked_0", 1.0, None),
    ]
    assert rows[1]["reward"] == 0.5


def test_a_sample_has_the_step_that_trains_on_it_and_the_one_that_generated_it(tmp_path: Path) -> None:
    writer = Records(tmp_path)
    for uid, step in (("ahead_0", 2), ("masked_0", None), ("same_0", 1), ("waiting_0", None)):
        writer.write(sample(uid, step=step, generated_step=1))  # only some modes know the step when they score
    writer.write_advantages(2, {"ahead_0": 0.5, "masked_0": None})
    writer.write_advantages(1, {"same_0": 0.5})
    assert writer.flush()
    found = {
        row["uid"]: (row["step"], row.get("generated_step"), row.get("advantage")) for row in rows_that_count(tmp_path)
    }
    assert found == {
        "ahead_0": (2, 1, 0.5),
        "masked_0": (2, 1, None),
        "same_0": (1, 1, 0.5),
        "waiting_0": (None, 1, None),
    }


def test_rows_are_read_while_other_threads_have_the_other_cursors(folder: Path) -> None:
    write(folder, *(sample(f"s{i}", step=1, score=1.0) for i in range(3)))
    found: list[str] = []
    with open_index(folder) as index, contextlib.ExitStack() as cursors:
        for _ in range(CURSORS - 1):
            cursors.enter_context(index.cursor())
        reader = threading.Thread(target=lambda: found.extend(row["uid"] for row in index.records()), daemon=True)
        reader.start()
        reader.join(60)
        assert not reader.is_alive()
    assert sorted(found) == ["s0", "s1", "s2"]
