"""The face of a package: the names in its ``__init__.pyi``, each imported on first use.

So `import reward_loop` is fast, and a worker process loads single modules of ``limits/`` and ``records/``. Type
checkers and editors read the stub.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def face(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__all__``, ``__getattr__`` and ``__dir__`` of a package whose stub is beside its ``file``."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text())
    imports = (statement for statement in stub.body if isinstance(statement, ast.ImportFrom))
    modules = {alias.name: statement.module or "" for statement in imports for alias in statement.names}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        # Python finds it without this function from now on.
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return sorted(modules), get, names
