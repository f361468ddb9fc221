"""The face of a room: the names in its ``__init__.pyi``, each imported on first use.

A worker process imports single modules of ``limits/`` and ``records/``, and must not load the others.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["face"]


def face(package: str, file: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return the ``__all__`` and the ``__getattr__`` of a package whose stub is beside its ``file``."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text())
    imports = (statement for statement in stub.body if isinstance(statement, ast.ImportFrom))
    modules = {alias.name: statement.module or "" for statement in imports for alias in statement.names}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(modules), get
