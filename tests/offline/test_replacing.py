from pathlib import Path

import pytest

from reward_loop.offline.folder import replacing


def test_the_new_file_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    file = tmp_path / "scores.jsonl"
    file.write_text("earlier")
    with replacing(file) as temporary:
        temporary.write_text("new")
        assert file.read_text() == "earlier"
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def write_half(file: Path) -> None:
    with replacing(file) as temporary:
        temporary.write_text("half")
        raise OSError(28, "No space left on device")


def test_an_error_keeps_the_earlier_file_and_leaves_no_temporary_one(tmp_path: Path) -> None:
    file = tmp_path / "scores.jsonl"
    file.write_text("earlier")
    with pytest.raises(OSError, match="No space left") as raised:
        write_half(file)
    assert raised.value.filename == str(tmp_path / ".partial-scores.jsonl")
    assert file.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [file]
