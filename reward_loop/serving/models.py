"""Resolves and checks the models of a configuration, and reads their kinds without loading them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Literal

from reward_loop.config import parse
from reward_loop.errors import ConfigError
from reward_loop.router.config import BackendConfig
from reward_loop.serving.engines import ENGINES
from reward_loop.serving.options import RewardModelConfig, ServedModelConfig

ModelKind = Literal["generative", "discriminative"]
"""A language model that generates text, or a model with a classification head that returns logits."""

_DISCRIMINATIVE = ("ForSequenceClassification", "RewardModel")
"""The suffixes of the architecture names of discriminative models."""


def served_models(config: RewardModelConfig) -> list[ServedModelConfig]:
    """Return all models of a configuration with their names, and with the kinds of those that reward_loop starts.

    Raises:
        ConfigError: an option is missing, contradicts another, or is not valid for the engine; or a model is not found.
    """
    models = [_settled(model, "") for model in _without_key(config)]
    for key, model in config.models.items():
        if model.served_model_name not in (None, key):
            raise ConfigError(
                f"models.{key}.served_model_name={model.served_model_name!r}: the model already has the name {key!r}; "
                "leave served_model_name out"
            )
        models.append(_settled(model.model_copy(update={"served_model_name": key}), f"models.{key}."))
    names = [model.served_model_name for model in models]
    for name in names:
        if name and names.count(name) > 1:
            raise ConfigError(f"two models have the name {name!r}: set served_model_name of one of them")
    return models


def check_path(path: str, option: str) -> None:
    """Reject the path of a model on a remote file system, such as ``hdfs://...``.

    Args:
        path: the model's path.
        option: the name of the option that holds the path, for the message.

    Raises:
        ConfigError: the path has a scheme.
    """
    if "://" in path:
        raise ConfigError(
            f"{option}={path}: reward model servers do not copy models from a remote file system. Copy the model to a "
            "directory that all nodes have, or set the name of a model on the Hugging Face hub"
        )


def _without_key(config: RewardModelConfig) -> list[ServedModelConfig]:
    """Return the model that is configured outside of `models`, if there is one."""
    return [config] if config.model_path or config.urls or not config.models else []


def _settled(model: ServedModelConfig, where: str) -> ServedModelConfig:
    if model.engine == "external":
        if not model.urls:
            raise ConfigError(f"{where}urls: engine='external' needs the servers' URLs")
        for url in model.urls:
            parse(BackendConfig, {"url": url}, f"{where}urls")
        return model
    if model.urls:
        raise ConfigError(
            f"{where}urls: valid only for engine='external'; engine={model.engine!r} starts its own servers"
        )
    if not model.model_path:
        raise ConfigError(f"{where}model_path: required, but not set")
    check_path(model.model_path, f"{where}model_path")
    kind = model_kind(model.model_path, f"{where}model_path")
    if model.kind not in ("auto", kind):
        raise ConfigError(f"{where}kind={model.kind!r}: the model in {model.model_path!r} is {kind}")
    settled = model.model_copy(
        update={
            "kind": kind,
            "served_model_name": model.served_model_name or model.model_path,
            "python": model.python and _absolute(model.python),
        }
    )
    try:
        ENGINES[model.engine].command(settled, "", 0)  # checks its options
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None
    return settled


def _absolute(python: str) -> str:
    """Return the absolute path of an interpreter. A name without a ``/`` is returned as it is, and looked up in PATH.

    Symbolic links are not followed: the interpreter of a virtual environment is one.
    """
    return str(Path(python).expanduser().absolute()) if os.sep in python else python


def model_kind(path: str | Path, option: str) -> ModelKind:
    """Return the kind of a model, according to its architecture.

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
    """Return the ``architectures`` in the ``config.json`` of a model.

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
        raise ConfigError(f"{option}: the directory {str(path)!r} does not exist")
    try:
        return [str(name) for name in json.loads(config.read_text())["architectures"] or ()]
    except FileNotFoundError:
        raise ConfigError(f"{option}: {str(config.parent)!r} is not a model: it has no config.json") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{option}: cannot read `architectures` from {config}: {problem}") from error


def _of_the_hub(name: str, option: str) -> Path:
    """Return the local path of a hub model's ``config.json``; download the file if it is not in the cache."""
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError:
        raise ConfigError(
            f"{option}: the directory {name!r} does not exist; for a model of the hub: pip install huggingface_hub"
        ) from None
    try:
        # `hf_hub_download` asks the hub even for a file in the cache.
        cached = try_to_load_from_cache(name, "config.json")
        return Path(cached if isinstance(cached, str) else hf_hub_download(name, "config.json"))
    # hf_hub_download raises only these errors for valid model names.
    except (OSError, ValueError) as error:
        cause = str(error).strip().split("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{option}: {name!r} is neither a directory nor a model in the Hugging Face cache, and the "
            f"download from the hub failed: {cause} Download the model first, or check the network, HF_HUB_OFFLINE, "
            "and HF_TOKEN for a private or gated model"
        ) from error
