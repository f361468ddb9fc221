"""Rewards that never block RL training of language models.

The public names are those of ``__init__.pyi``. Each is imported on first use: `import reward_loop` is fast and does not
import torch, Ray, transformers or verl.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.2.0"


def _public_names() -> dict[str, str]:
    """Return the names that ``__init__.pyi`` imports, each with its module."""
    path = Path(__file__).with_suffix(".pyi")
    try:
        stub = ast.parse(path.read_text())
    except OSError as error:
        raise ImportError(
            f"{path} cannot be read: it lists the public names. Install the package with this file ({error})"
        ) from None
    imports = (statement for statement in stub.body if isinstance(statement, ast.ImportFrom))
    return {alias.name: statement.module or "" for statement in imports for alias in statement.names}


_MODULES = _public_names()

__all__ = sorted([*_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
