"""verl's FSDP2 engines on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import verl.utils.model
from transformers import AutoModelForTokenClassification
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

__all__ = ["CPUEngineWithLMHead", "CPUEngineWithValueHead"]


class _WithoutOffload:
    """Keeps forward-only modules (the reference policy) from ``CPUOffloadPolicy(pin_memory=True)``.

    On a CPU there is nothing to offload to, and no memory to pin.
    """

    engine_config: Any

    def _build_fsdp_module(self, module: Any) -> Any:
        configured = self.engine_config
        self.engine_config = copy.copy(configured)
        object.__setattr__(self.engine_config, "forward_only", False)
        object.__setattr__(self.engine_config, "offload_policy", False)
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config = configured


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUEngineWithLMHead(_WithoutOffload, FSDPEngineWithLMHead):
    """Actor and reference policy."""


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUEngineWithValueHead(_WithoutOffload, FSDPEngineWithValueHead):
    """Critic."""


def _load_critic(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    return AutoModelForTokenClassification.from_pretrained(
        local_path, torch_dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )


# verl's asks for FlashAttention, whatever is configured.
verl.utils.model.load_valuehead_model = _load_critic
