"""verl's FSDP2 engines on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import verl.utils.fsdp_utils
import verl.utils.model
from transformers import AutoModelForTokenClassification
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead


class _WithoutOffload:
    """Disables ``CPUOffloadPolicy(pin_memory=True)`` for forward-only modules (the reference policy).

    On a CPU, offloading has no purpose and memory cannot be pinned.
    """

    engine_config: Any

    def _build_fsdp_module(self, module: Any) -> Any:
        config = copy.copy(self.engine_config)
        # Around the check of verl's configuration, which is frozen; this is a copy of it.
        object.__setattr__(config, "forward_only", False)
        object.__setattr__(config, "offload_policy", False)
        given, self.engine_config = self.engine_config, config
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config = given


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUEngineWithLMHead(_WithoutOffload, FSDPEngineWithLMHead):
    """verl's FSDP engine for the actor and the reference policy, on a CPU."""


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUEngineWithValueHead(_WithoutOffload, FSDPEngineWithValueHead):
    """verl's FSDP engine for the critic, on a CPU."""


def _load_critic(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    return AutoModelForTokenClassification.from_pretrained(
        local_path, torch_dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )


# verl's function always requests FlashAttention, which needs a GPU.
verl.utils.model.load_valuehead_model = _load_critic


_save = verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu


def _save_copies(model: Any) -> Any:
    weights, spec = _save(model)
    return {name: (tensor.clone(), of) for name, (tensor, of) in weights.items()}, spec


# verl keeps the old policy of `separate_async` by `.cpu()`, which makes no copy on a CPU: it would change with the new
# one.
verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu = _save_copies
