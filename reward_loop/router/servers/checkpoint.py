"""What a model directory holds, as far as can be told without loading it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

from reward_loop.errors import ConfigError

__all__ = ["ModelKind", "model_kind"]

ModelKind = Literal["generative", "discriminative"]
"""A language model that writes, or one with a classification head that gives logits."""


def _in_cache(name: str) -> Path | None:
    """Where the cache has the model of that name."""
    if Path(name).is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def model_kind(path: str | Path, option: str) -> ModelKind:
    """Reads the kind of a model from the ``architectures`` in its ``config.json``.

    Args:
        path: a directory in the format of ``save_pretrained``, or the name of a model in the Hugging Face cache.
        option: where the user wrote the path; messages name it.

    Raises:
        ConfigError: there is no such model, or no readable ``config.json`` in it.
    """
    path = _in_cache(str(path)) or Path(path)
    if not path.is_dir():
        raise ConfigError(
            f"{option}: there is no directory {str(path)!r}, nor a model of that name in the Hugging Face cache; "
            "download the model first"
        )
    try:
        architectures = json.loads((path / "config.json").read_text())["architectures"]
    except FileNotFoundError:
        raise ConfigError(f"{option}: there is no config.json in {str(path)!r}, so it is not a model") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{option}: cannot read `architectures` from {path / 'config.json'}: {problem}") from error
    discriminative = any(str(name).endswith("ForSequenceClassification") for name in architectures or ())
    return "discriminative" if discriminative else "generative"
