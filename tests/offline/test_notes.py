"""Notes of readers on samples."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from reward_loop.offline.notes import Notes
from reward_loop.records import Records
from reward_loop.records.reader import RecordsReader
from tests.view.recorded import flushed, record


def test_the_latest_note_of_all_writers_counts_and_an_empty_one_removes_it(tmp_path: Path) -> None:
    one, other = Notes(tmp_path), Notes(tmp_path)
    assert one.texts() == {}
    one.write("a-0", "a", 1, "first")
    other.write("a-0", "a", 1, "second \ud800")
    one.write("b-1", None, None, "of b")
    assert one.texts() == other.texts() == {"a-0": "second \\ud800", "b-1": "of b"}
    other.write("b-1", None, None, "")
    assert Notes(tmp_path).texts() == {"a-0": "second \\ud800"}
    assert len(list((tmp_path / "notes").glob("*.jsonl"))) == 2


def test_an_incomplete_line_is_left_out(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    notes.write("a-0", "a", 1, "kept")
    (path,) = (tmp_path / "notes").glob("*.jsonl")
    with path.open("a") as file:
        file.write('{"version": 1, "kind": "note", "id": "a-0", "te')
    assert notes.texts() == {"a-0": "kept"}


def test_a_note_that_cannot_be_written_is_an_error_and_the_next_one_is_tried_again(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    (tmp_path / "notes").write_text("a file")
    with pytest.raises(OSError, match="notes"):
        notes.write("a-0", "a", 1, "lost")
    (tmp_path / "notes").unlink()
    notes.write("a-0", "a", 1, "kept")
    assert notes.texts() == {"a-0": "kept"}


def test_a_note_for_which_there_is_no_space_leaves_no_incomplete_line(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    notes.write("a-0", "a", 1, "kept")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            notes.write("b-1", "b", 1, "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    notes.write("c-2", "c", 1, "kept too")
    assert notes.texts() == {"a-0": "kept", "c-2": "kept too"}


def test_notes_are_no_rows_of_samples(tmp_path: Path) -> None:
    writer = Records(tmp_path)
    record(writer, "a")
    flushed(writer)
    Notes(tmp_path).write("a-0", "a", 1, "a note")
    reader = RecordsReader(tmp_path)
    assert [row["uid"] for row in reader.rows()] == ["a"]
    assert reader.incomplete == 0
