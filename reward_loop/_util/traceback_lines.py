"""Selects the lines of a traceback that show where the user's code failed."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

__all__ = ["last_user_frame", "user_lines"]

_OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGE_FOLDERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_SHOWN = 3


def user_lines(error: BaseException) -> str:
    """Returns up to three formatted traceback entries of an exception that a reward function raised.

    The last entry is that of the user's own code. If a library raised the exception, the library's last entry follows.
    Entries of reward_loop are left out.
    """
    frames = _frames(error)
    last = _last_of_user(frames) or 0  # no user code: the function belongs to an installed package
    shown = frames[: last + 1][-_SHOWN:]
    if last + 1 < len(frames):
        shown = [*shown[1 - _SHOWN :], frames[-1]]
    return "".join(traceback.format_list(shown)).rstrip()


def last_user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Returns the last frame of the user's own code in the traceback, or else the last frame of a library."""
    frames = _frames(error)
    last = _last_of_user(frames)
    return frames[-1 if last is None else last] if frames else None


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]


def _last_of_user(frames: list[traceback.FrameSummary]) -> int | None:
    return max((index for index, frame in enumerate(frames) if not _is_library(frame.filename)), default=None)


def _is_library(filename: str) -> bool:
    return filename.startswith((*_LIBRARIES, "<frozen ")) or any(folder in filename for folder in _PACKAGE_FOLDERS)
