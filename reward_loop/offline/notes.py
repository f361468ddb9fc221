"""Notes of readers on samples, kept beside the records.

Invariants:

- Each process appends to a file of its own in ``notes/``, so viewers of several nodes can write at the same time.
- Nothing deletes or rewrites these files: neither the maximum size of the folder nor ``reward-loop score --restart``.
"""

from __future__ import annotations

import threading
from pathlib import Path

from reward_loop.records import NOTES, RecordFiles, encode_record, new_row, read_rows

NOTE = "note"
"""The kind of these rows."""


class Notes:
    """The notes in a records folder.

    Args:
        folder: the records folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / NOTES
        # The size has no effect: only writing texts deletes files, and notes have none.
        self._files = RecordFiles(self._folder, max_bytes=0)
        self._lock = threading.Lock()

    def texts(self) -> dict[str, str]:
        """Return the text of each note, by the ID of its sample. Of several notes on a sample, the latest counts.

        Raises:
            ConfigError: a newer version has written them.
        """
        rows = (row for row in read_rows(self._folder) if row.get("kind") == NOTE)
        latest = {row["id"]: row["text"] for row in sorted(rows, key=lambda row: row["time"])}
        return {name: text for name, text in latest.items() if text}

    def write(self, sample: str, uid: str | None, step: int | None, text: str) -> None:
        """Append a note on a sample; an empty one removes the earlier ones.

        Args:
            sample: the ID of the sample.
            uid: its uid.
            step: its training step.
            text: the note.

        Raises:
            OSError: the note cannot be written, such as on a full disk.
        """
        line = encode_record(new_row(NOTE, id=sample, uid=uid, step=step, text=text)) + b"\n"
        # The routes of the viewer run in threads: `failure` must be that of this note.
        with self._lock:
            self._files.failure = None
            self._files.add_rows([line])
            if self._files.failure is not None:
                raise self._files.failure
