"""What to change if user code fails to import a module that exists beside it."""

from __future__ import annotations

import traceback
from pathlib import Path

__all__ = ["import_hint"]

_LEVELS = 4
"""The number of folders in which a module is looked for: that of the importing file, and those above it."""


def import_hint(error: BaseException) -> str:
    """Return the fix of a failed import as the end of a message, such as ``; helper is in /home/me: ...``.

    Empty if the error is another one, or the module is not near the file that imports it.
    """
    if not isinstance(error, ImportError):
        return ""
    files = [
        Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()
    ]
    if not files:
        return ""
    if error.name is None and "relative import" in str(error):
        return (
            "; a file on its own has no package: write `import helper`, or name the module of a package that is on "
            "PYTHONPATH, such as package.reward:compute_score"
        )
    for folder in list(files[-1].resolve().parents)[:_LEVELS]:
        path = folder.joinpath(*(error.name or "").split("."))
        found = next((one for one in (path.with_suffix(".py"), path) if error.name and one.exists()), None)
        if found is None:
            continue
        if isinstance(error, ModuleNotFoundError):
            return f"; {error.name} is in {folder}: add that folder to PYTHONPATH"
        if error.path is not None and not Path(error.path).resolve().is_relative_to(folder):
            return f"; {error.path} was imported in place of {found}: rename that file"
    return ""
