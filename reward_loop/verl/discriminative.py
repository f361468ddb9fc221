"""Rewards from a discriminative reward model without a reward function: the reward is the model's logit."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

from reward_loop.client import classify
from reward_loop.managers import NaiveRewardLoopManager
from reward_loop.router.config import API_KEY_VARIABLE
from reward_loop.types import RewardSample

__all__ = ["DiscriminativeRewardLoopManager", "compute_score"]


class DiscriminativeRewardLoopManager(NaiveRewardLoopManager):
    """Scores the conversation of a rollout with the reward model, as verl's own reward loop does.

    The conversation is the row's ``raw_prompt``, followed by the response as the assistant's turn. The response keeps
    its special tokens, except the policy's end-of-sequence token. The reward model's chat template is applied to the
    conversation.
    """

    async def to_sample(self, data: Any) -> RewardSample:
        """Returns the sample, with the reward model's input as ``extra_info["reward_model_input"]``."""
        sample = await super().to_sample(data)
        row = data if data.batch["responses"].ndim == 1 else data[-1]
        prompt = row.non_tensor_batch.get("raw_prompt")
        if prompt is None:
            return replace(sample, error='its row has no non_tensor_batch["raw_prompt"], the conversation to score')
        try:
            text = await asyncio.to_thread(self._render, list(prompt), row.batch)
        except Exception as error:  # a chat template is code from the model's author
            return replace(sample, error=f"the reward model's chat template failed: {type(error).__name__}: {error}")
        return replace(sample, extra_info={**sample.extra_info, "reward_model_input": text})

    def _render(self, conversation: list[dict[str, Any]], batch: Any) -> str:
        length = batch["responses"].shape[-1]
        ids = batch["responses"][: int(batch["attention_mask"][-length:].sum())] if length else []
        response = self.tokenizer.decode(ids).replace(self.tokenizer.eos_token or "", "")
        text: str = self.reward_model_tokenizer.apply_chat_template(
            [*conversation, {"role": "assistant", "content": response}], add_generation_prompt=False, tokenize=False
        )
        # The server's tokenizer adds the token again.
        return text.removeprefix(self.reward_model_tokenizer.bos_token or "")


async def compute_score(
    extra_info: dict[str, Any], reward_router_address: str, model: str | None = None
) -> dict[str, float]:
    """Returns the logit of ``extra_info["reward_model_input"]``; if there are several, the last one, as in verl."""
    logits = await classify(
        reward_router_address,
        extra_info["reward_model_input"],
        model=model,
        timeout=None,
        api_key_env=API_KEY_VARIABLE if os.environ.get(API_KEY_VARIABLE) else None,
    )
    return {"score": logits[-1] if isinstance(logits, list) else logits}
