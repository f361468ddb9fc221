"""Load a function, class or other object by name, from a file or from an importable module."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from reward_loop._util.text import did_you_mean, last_user_frame, listing
from reward_loop.errors import FunctionLoadError

# Reentrant: the file may load another function while it is imported.
_import_lock = threading.RLock()

_FILE_MODULE = "reward_loop_file_"

_READY = {f"judge:{name.lower()}": name for name in ("Equality", "Rubric")}
"""The short names of the ready judges -> their classes in `reward_loop.judges`."""


def load_function(path: str, name: str | None = None) -> Any:
    """Load a reward function.

    Args:
        path: a file (``reward.py``), ``pkg://module``, or one import path: ``reward.py:compute_score``,
            ``package.module:compute_score``; or a ready judge: ``judge:equality`` or ``judge:rubric``.
        name: the function's name, if ``path`` does not contain it; by default ``compute_score``. A dotted name
            selects an attribute: ``judge.score``.

    Returns:
        the object itself, which is a function, a callable object, or a class or instance with ``compute_score``.

    Raises:
        FunctionLoadError: the function cannot be found or imported, or is not callable.

    Example::

        compute_score = load_function("rewards.py:compute_score")
    """
    spec = path
    if _split(path)[1] is None:
        name = name or "compute_score"
        spec = f"{path}:{name}"
    loaded = load_object(path, name)
    if not callable(loaded) and not callable(getattr(loaded, "compute_score", None)):
        raise FunctionLoadError(
            f"{spec} is a {type(loaded).__name__}, which cannot be called: name a function, a callable "
            "object, or a class with a `compute_score` method"
        )
    return loaded


def load_object(path: str, name: str | None = None) -> Any:
    """Load any object. The arguments are those of `load_function`, but the name has no default.

    Raises:
        FunctionLoadError: no name is given, two different names are given, or the object cannot be found or imported.
    """
    source, in_path = _split(path)
    if name and in_path and name != in_path:
        raise FunctionLoadError(
            f"{path!r} contains the name {in_path!r}, and the name {name!r} is also given: remove one"
        )
    name = name or in_path
    if not name:
        raise FunctionLoadError(f"{path!r} has no name of an object to load: write `{path}:name`")
    module = _load_file(source) if source.endswith(".py") else _load_module(source)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            callables = _callables(module)
            raise FunctionLoadError(
                f"{source} has no {name!r}{did_you_mean(name, callables) or '.'} Callables there: {listing(callables)}"
            ) from None
    return found


def without_partial(function: Any) -> Any:
    """Return the function in a `functools.partial`; others are returned unchanged."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def source_hash(function: Any) -> str | None:
    """Return the SHA-256 hex digest of the function's source file, or ``None`` if there is none.

    Modules that the file imports are not covered.
    """
    function = without_partial(function)
    module = sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)
    source = getattr(module, "__file__", None)
    try:
        return hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else None
    except OSError:  # a script from standard input, whose file is "<stdin>"; a module in a zip archive; a deleted file
        return None


def file_modules() -> dict[str, str]:
    """Return the modules loaded from files: name -> path. Another process cannot import them by name alone."""
    # Of a copy, because other threads may import modules meanwhile.
    return {name: str(module.__file__) for name, module in list(sys.modules.items()) if name.startswith(_FILE_MODULE)}


def _split(path: str) -> tuple[str, str | None]:
    """Split ``source:name`` into source and name (``None`` without a colon); drop the prefix ``pkg://``.

    Raises:
        FunctionLoadError: the path is ``judge:`` with the name of no ready judge.
    """
    if path.startswith("judge:"):
        if path not in _READY:
            raise FunctionLoadError(
                f"no ready judge {path!r}{did_you_mean(path, _READY) or '.'} Ready judges: {listing(_READY)}. A "
                "function in a module `judge` is written `judge.py:name` or `pkg://judge:name`"
            )
        return "reward_loop.judges", _READY[path]
    source, colon, name = path.removeprefix("pkg://").partition(":")
    return (source, name) if colon else (source, None)


def _callables(module: ModuleType) -> list[str]:
    """Return the names of the public callables that the module itself defines."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and getattr(value, "__module__", module.__name__) == module.__name__
    ]


def _load_file(path: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        near = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise FunctionLoadError(f"no such file: {path} (looked for {file}){did_you_mean(file.name, near)}")
    # A stable module name per file: a file is loaded once, and dataclasses, pickle and inspect find it by name.
    name = f"{_FILE_MODULE}{hashlib.sha256(str(file).encode()).hexdigest()[:12]}_{file.stem}"
    with _import_lock:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None  # as of each file of Python
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Before the code runs, as Python does: a dataclass in the file looks its module up.
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        # The user's file may call `sys.exit`.
        except (Exception, SystemExit) as error:
            # A module that ran half must not be found by the next load.
            del sys.modules[name]
            raise FunctionLoadError(f"importing {path} failed: {_cause(error)}") from error
        return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise FunctionLoadError(
                f"no module named {error.name!r}: a file is written with its suffix (`path/to/file.py:name`), and a "
                "module must be installed or on PYTHONPATH"
            ) from error
        raise FunctionLoadError(f"importing {name} failed: {_cause(error)}") from error
    except (Exception, SystemExit) as error:
        raise FunctionLoadError(f"importing {name} failed: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """Return the exception's type and message, the last line of the user's code in its traceback, and a known fix."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return text
    frame = last_user_frame(error)
    at = f" (at {frame.filename}:{frame.lineno})" if frame and not frame.filename.startswith("<") else ""
    return f"{text}{at}"
