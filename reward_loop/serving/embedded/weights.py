"""Reads the model of the embedded server from its directory."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from reward_loop._util.text import listing
from reward_loop.errors import ConfigError
from reward_loop.serving.checkpoint import ModelKind

__all__ = ["read_model"]


def read_model(path: str, kind: ModelKind) -> Any:
    """Returns the model of a directory, in float32 and eval mode.

    Raises:
        ConfigError: the directory lacks weights of the model. transformers would initialise them randomly.
    """
    auto = (
        transformers.AutoModelForCausalLM if kind == "generative" else transformers.AutoModelForSequenceClassification
    )
    model, info = auto.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    if missing := info["missing_keys"]:
        raise ConfigError(
            f"{path} has no weights for {listing(missing)} of {type(model).__name__}: the embedded server supports "
            "only models with transformers' own heads. Use vLLM or SGLang"
        )
    return model.eval()
