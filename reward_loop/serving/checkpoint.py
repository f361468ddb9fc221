"""Reads the kind of a model from its ``config.json``, without loading the model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

from reward_loop.errors import ConfigError

__all__ = ["ModelKind", "architectures", "model_kind"]

ModelKind = Literal["generative", "discriminative"]
"""A language model that generates text, or a model with a classification head that returns logits."""

_DISCRIMINATIVE = ("ForSequenceClassification", "RewardModel")
"""The suffixes of the architecture names of discriminative models."""


def model_kind(path: str | Path, option: str) -> ModelKind:
    """Returns the kind of a model, according to its architecture.

    Args:
        path, option: see `architectures`.

    Raises:
        ConfigError: the model does not exist, has no readable ``config.json``, or classifies tokens.
    """
    names = architectures(path, option)
    for name in names:
        if name.endswith("ForTokenClassification"):
            raise ConfigError(
                f"{option}: {name} returns numbers for tokens, and answers neither chat nor /classify requests. Run a "
                "server for it yourself (engine='external' with kind='discriminative'), and send requests to /pooling"
            )
    return "discriminative" if any(name.endswith(_DISCRIMINATIVE) for name in names) else "generative"


def architectures(path: str | Path, option: str) -> list[str]:
    """Returns the ``architectures`` in the ``config.json`` of a model.

    If the model is on the Hugging Face hub and not in the cache, only ``config.json`` is downloaded; the engine
    downloads the rest.

    Args:
        path: a directory in the format of ``save_pretrained``, or the name of a model of the Hugging Face hub.
        option: the name of the option that holds the path, for error messages.

    Raises:
        ConfigError: the model does not exist, or has no readable ``config.json``.
    """
    if Path(path).is_dir():
        config = Path(path) / "config.json"
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        config = _of_the_hub(str(path), option)
    else:
        raise ConfigError(f"{option}: there is no directory {str(path)!r}")
    try:
        return [str(name) for name in json.loads(config.read_text())["architectures"] or ()]
    except FileNotFoundError:
        raise ConfigError(
            f"{option}: there is no config.json in {str(config.parent)!r}, so it is not a model"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{option}: cannot read `architectures` from {config}: {problem}") from error


def _of_the_hub(name: str, option: str) -> Path:
    """Returns the local path of a hub model's ``config.json``; downloads the file if it is not in the cache."""
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
    # hf_hub_download raises only these errors for valid model names.
    except (OSError, ValueError) as error:
        cause = str(error).strip().split("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{option}: there is no directory {name!r}, nor a model of that name in the Hugging Face cache, and the "
            f"download from the hub failed: {cause} Download the model first, or check the network, HF_HUB_OFFLINE, "
            "and HF_TOKEN for a private or gated model"
        ) from error
