"""The files of a records folder.

Invariants:

- A file has one writer in its lifetime: its name contains the host, the process ID and a random part. So only its last
  line can be incomplete.
- Texts are in numbered segments. Whole segments are deleted, the oldest first, when the folder is too large.
- A row names the segment, the offset and the length of its texts. It is written after them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from pathlib import Path
from typing import Literal, NamedTuple

logger = logging.getLogger(__name__)

VERSION = 1
"""The version of the format. A reader rejects higher versions."""

SAMPLE, ADVANTAGE, RESUMED = "sample", "advantage", "resumed"
"""The kinds of rows. An advantage adds to an earlier row of the same ``uid``; `resumed_row` takes earlier rows back."""

PHASE, ROLLOUT, OVERLAP = "phase", "rollout", "overlap"
"""The kinds of events of a trainer: they are in files of their own."""

WaitsFor = Literal["rollouts", "rewards"]
"""What the trainer waits for in a phase: for responses, or for responses and their rewards."""

TEXTS, EXCHANGES = "texts", "exchanges"
"""The sub-folders of texts: those of samples, and those of their exchanges with model servers."""

EVENTS, HEALTH = "events", "health"
"""The sub-folders of rows that are not samples: the trainer's events, and the live numbers of its steps with their
warnings."""

SEGMENTS = 512
"""A segment ends when it is larger than this part of the folder's maximum size."""


class TextPlace(NamedTuple):
    """Where texts begin."""

    file: str
    """The path of the segment, relative to the folder."""
    offset: int


class RecordFiles:
    """The files that one process writes into a records folder.

    An error of the file system loses records. A warning is logged once, and the number of lost records when writing
    succeeds again.

    Args:
        folder: the records folder; it is created.
        max_bytes: the largest size of all files in it, also those of other processes.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        # With a random part: host names and process IDs repeat in containers and after a restart.
        self.path = folder / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        self._max_bytes = max_bytes
        self._numbers = {TEXTS: 0, EXCHANGES: 0}
        self.failure: OSError | None = None
        """The first error since it was last set to ``None``."""
        self.lost = 0
        """The number of records lost since rows were last written, or since :meth:`log_lost`."""
        self._failing: set[Path] = set()
        """The folders in which the last write failed."""

    def add_rows(self, lines: bytes, count: int) -> None:
        """Append ``count`` lines to the file of rows."""
        if self._append(self.path, lines) is None:
            self.lost += count
        else:
            self.log_lost("records are written again")

    def log_lost(self, now: str) -> None:
        """Log how many records were lost, if any; ``now`` is the beginning of the message."""
        if self.lost:
            lost, self.lost = self.lost, 0
            logger.warning("%s: %d were lost; their samples were scored (%s)", now, lost, self.folder)

    def add_events(self, lines: bytes | bytearray) -> None:
        """Append lines to the file of events."""
        self._append(self.folder / EVENTS / self.path.name, lines)

    def add_texts(self, kind: str, texts: bytes | memoryview) -> TextPlace | None:
        """Append texts to the current segment of a kind: `TEXTS` or `EXCHANGES`.

        Returns:
            where they are; ``None`` if they are empty or could not be written.
        """
        if not texts:
            return None
        segment = self._segment(kind)
        offset = self._append(segment, texts)
        if offset is None:
            return None
        if offset + len(texts) > self._max_bytes // SEGMENTS:
            self._numbers[kind] += 1
            self._delete_oldest()
        return TextPlace(f"{kind}/{segment.name}", offset)

    def _segment(self, kind: str) -> Path:
        return self.folder / kind / f"{self.path.stem}.{self._numbers[kind]:06}.jsonl"

    def _append(self, path: Path, data: bytes | bytearray | memoryview) -> int | None:
        """Append to a file. Return the offset of the data; ``None`` if it could not be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: an error must come from `write`, so that `truncate` removes the whole line.
            with path.open("ab", buffering=0) as file:
                start = file.tell()
                try:
                    left = memoryview(data)
                    while left:
                        # Without a buffer, `write` may write only a part.
                        left = left[file.write(left) :]
                except OSError:
                    with contextlib.suppress(OSError):
                        file.truncate(start)  # removes an incomplete line, which readers could not parse
                    raise
        except OSError as error:
            if not self._failing:
                logger.warning("records of samples are lost: cannot write %s: %s", path, error)
            error.filename = error.filename or str(path)
            self.failure = self.failure or error
            self._failing.add(path.parent)
            return None
        self._failing.discard(path.parent)
        return start

    def _delete_oldest(self) -> None:
        """Delete the oldest segments while the folder is larger than its maximum.

        Exchanges are deleted first, down to half of the size that all texts may take; then the texts of samples.
        """
        try:
            folders = (self.folder, *(self.folder / name for name in (EVENTS, HEALTH)))
            rows = sum(size for folder in folders for _, size, _ in _files(folder))
            left = {kind: sorted(_files(self.folder / kind)) for kind in (TEXTS, EXCHANGES)}
        except OSError:
            return  # `_append` reports a file system that does not work
        sizes = {kind: sum(size for _, size, _ in files) for kind, files in left.items()}
        room = max(0, self._max_bytes - rows)
        while sum(sizes.values()) > room:
            is_first = sizes[EXCHANGES] > room // 2 or not left[TEXTS]
            kind = EXCHANGES if left[EXCHANGES] and is_first else TEXTS
            _, size, path = left[kind].pop(0)
            with contextlib.suppress(OSError):  # another process has deleted it
                os.unlink(path)
            sizes[kind] -= size


def _files(folder: Path) -> list[tuple[int, int, str]]:
    """Return time of the last change, size and path of the files in a folder; nothing if there is no such folder."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process has just deleted it
                if entry.name.endswith(".jsonl"):
                    status = entry.stat()
                    found.append((status.st_mtime_ns, status.st_size, entry.path))
    return found
