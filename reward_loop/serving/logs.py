"""Opens and reads the log files of servers. A server starts even if its log file cannot be written."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

from reward_loop.errors import ConfigError

__all__ = ["ServerLog", "log_folder"]

logger = logging.getLogger(__name__)

_PREFIX = "reward_loop-"
_TAIL_BYTES = 8192
_TAIL_LINES = 25


def log_folder(log_dir: str | None) -> Path:
    """Return the folder for the logs of servers, and create it if needed.

    Args:
        log_dir: the folder that the user has configured; ``None`` for a new temporary folder.

    Raises:
        ConfigError: the folder cannot be created; the message names it and the option.
    """
    try:
        folder = Path(log_dir or tempfile.mkdtemp(prefix=_PREFIX)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if log_dir:
            raise ConfigError(
                f"log_dir={log_dir!r}: this folder cannot be created: {error.strerror}. Set log_dir to another folder"
            ) from error
        raise ConfigError(
            f"no temporary folder for the logs of servers can be created: {error}. Set log_dir, or the environment "
            "variable TMPDIR, to a folder that can be written"
        ) from error
    return folder


class ServerLog:
    """The file to which a server's standard output and error are appended.

    If the file cannot be written (a full disk, a folder that was deleted), the server runs without a log, and a warning
    names the file.

    Args:
        name: the server's name in the warning.
        path: the file; ``None`` for one in a new temporary folder.
    """

    def __init__(self, name: str, path: Path | None) -> None:
        self.path = path
        self._temporary: Path | None = None
        """The folder of the file, if this object has created it."""
        self._name = name
        self._problem: str | None = None

    def open(self) -> BinaryIO:
        """Open the log file for a new server process; open the null device if the file cannot be written."""
        try:
            if self.path is None:
                self._temporary = Path(tempfile.mkdtemp(prefix=_PREFIX))
                self.path = self._temporary / "server.log"
            log = _writable(self.path)
        except OSError as error:
            self._problem = f"{self.path or 'a temporary folder'} cannot be written: {error.strerror or error}"
            logger.warning(
                "%s runs without a log: %s. Free space there, or set log_dir to another folder",
                self._name,
                self._problem,
            )
            return open(os.devnull, "ab", buffering=0)
        self._problem = None
        return log

    def discard(self) -> None:
        """Remove the temporary folder of the log, if it is in one."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = self.path = None

    def lines(self) -> list[str]:
        """Return up to 25 last lines; an empty list if the file cannot be read."""
        if self.path is None or self._problem:
            return []
        try:
            with self.path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError:
            return []

    def end(self) -> str:
        """Return text for the end of an error message: the last lines, or the reason why there are none."""
        if self._problem:
            return f"It ran without a log: {self._problem}. Free space there, or set log_dir to another folder."
        lines = self.lines()
        if not lines:
            return f"Its log {self.path} is empty."
        return "\n".join([f"The end of its log {self.path}:", *(f"    {line}" for line in lines)])


def _writable(path: Path) -> BinaryIO:
    """Open a file for appending, and test that a byte can be written.

    Raises:
        OSError: the folder cannot be created, or the file cannot be opened or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("ab", buffering=0)
    try:
        status = os.fstat(log.fileno())
        # A full disk shows only at a write.
        log.write(b"\n")
        # A device or a pipe cannot be truncated.
        if stat.S_ISREG(status.st_mode):
            os.ftruncate(log.fileno(), status.st_size)
    except OSError:
        log.close()
        raise
    return log
