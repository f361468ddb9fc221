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

_DISCRIMINATIVE = ("ForSequenceClassification", "RewardModel")
"""How the names of their architectures end."""


def model_kind(path: str | Path, option: str) -> ModelKind:
    """Reads the kind of a model from the ``architectures`` in its ``config.json``.

    Of a model of the Hugging Face hub that is not in the cache, this one file is downloaded; its engine gets the rest.

    Args:
        path: a directory in the format of ``save_pretrained``, or the name of a model of the Hugging Face hub.
        option: where the user wrote the path; messages name it.

    Raises:
        ConfigError: there is no such model, or no readable ``config.json`` in it.
    """
    if Path(path).is_dir():
        config = Path(path) / "config.json"
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        config = _of_the_hub(str(path), option)
    else:
        raise ConfigError(f"{option}: there is no directory {str(path)!r}")
    try:
        architectures = json.loads(config.read_text())["architectures"]
    except FileNotFoundError:
        raise ConfigError(
            f"{option}: there is no config.json in {str(config.parent)!r}, so it is not a model"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{option}: cannot read `architectures` from {config}: {problem}") from error
    discriminative = any(str(name).endswith(_DISCRIMINATIVE) for name in architectures or ())
    return "discriminative" if discriminative else "generative"


def _of_the_hub(name: str, option: str) -> Path:
    """Where the ``config.json`` of a model is, from now on at the latest."""
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError:
        raise ConfigError(
            f"{option}: there is no directory {name!r}; for a model of the hub: pip install huggingface_hub"
        ) from None
    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    try:
        return Path(hf_hub_download(name, "config.json"))
    # All that it raises, but for names that no model can have.
    except (OSError, ValueError) as error:
        cause = str(error).strip().split("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{option}: there is no directory {name!r}, nor a model of that name in the Hugging Face cache, and the "
            f"hub did not give it: {cause} Download the model first, or see to the network, HF_HUB_OFFLINE, and "
            "HF_TOKEN for a model that is private or gated"
        ) from error
