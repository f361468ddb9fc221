"""Parts of error messages: shortened values, the user's lines of a traceback."""

from __future__ import annotations

import contextlib
import difflib
import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path


def counted(number: int, noun: str) -> str:
    """Return a number with a noun in singular or plural."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def cut(text: str, limit: int) -> str:
    """Return the text, cut to ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` if a known name is similar, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def duration(seconds: float) -> str:
    """Return ``1.5 s``, or ``1.5 ms`` for less than a second."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def listing(names: Iterable[str]) -> str:
    """Return the names, sorted and separated by commas, or ``none``."""
    return ", ".join(sorted(names)) or "none"


def rounded(value: float) -> str:
    """Return a number for people: four significant digits, or all digits before the point: ``0.4286``, ``12,345``."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def shorten(value: object, limit: int = 120) -> str:
    """Return ``repr(value)``, cut to ``limit`` characters; an object whose ``repr`` raises is named by its type."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__qualname__}, whose repr() raises>"
    return cut(text, limit)


def first_line(error: str) -> str:
    """Return the error's first line without the name of its sample: its cause, if nothing else is known about it."""
    line = error.partition("\n")[0]
    return line.partition(": ")[2] or line


_OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
# Packages of other environments on the path, and of Debian's Python.
_PACKAGE_FOLDERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_SHOWN = 3


def user_lines(error: BaseException) -> str:
    """Return up to three formatted traceback entries of an exception that a reward function raised.

    The last entry is that of the user's own code. If a library raised the exception, the library's last entry follows.
    Entries of reward_loop are left out.
    """
    frames = _without_ours(traceback.extract_tb(error.__traceback__))
    last = _last_of_user(frames) or 0  # no user code: the function belongs to an installed package
    shown = frames[: last + 1][-_SHOWN:]
    if last + 1 < len(frames):
        shown = [*shown[1 - _SHOWN :], frames[-1]]
    return "".join(traceback.format_list(shown)).rstrip()


def last_user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the last frame of the user's own code in the traceback, or else the last frame of a library."""
    return user_frame(traceback.extract_tb(error.__traceback__))


def user_frame(stack: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the last frame of the user's own code in a stack, or else the last frame of a library."""
    frames = _without_ours(stack)
    last = _last_of_user(frames)
    return frames[-1 if last is None else last] if frames else None


def _without_ours(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    frames, follows_ours = [], False
    for frame in stack:
        if frame.filename.startswith(_OURS):
            follows_ours = True
        elif not (follows_ours and frame.filename == contextlib.__file__):  # the one that enters a context of ours
            follows_ours = False
            frames.append(frame)
    return frames


def _last_of_user(frames: list[traceback.FrameSummary]) -> int | None:
    return max((index for index, frame in enumerate(frames) if not _is_library(frame.filename)), default=None)


def _is_library(filename: str) -> bool:
    return filename.startswith((*_LIBRARIES, "<frozen ")) or any(folder in filename for folder in _PACKAGE_FOLDERS)
