"""Reward managers written for verl, without a thought of this library."""

from __future__ import annotations

import asyncio
from typing import Any

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase


class Length(RewardManagerBase):
    """Rewards long responses."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)

    async def run_single(self, data: Any) -> dict:
        text = self.tokenizer.decode(data[0].batch["responses"], skip_special_tokens=True)
        return {"reward_score": len(text), "reward_extra_info": {"text": text}}


class Raises(Length):
    async def run_single(self, data: Any) -> dict:
        raise ConnectionError("the sandbox is gone")


class Hangs(Length):
    async def run_single(self, data: Any) -> dict:
        await asyncio.Event().wait()
        return {}


class NotANumber(Length):
    async def run_single(self, data: Any) -> dict:
        return {"reward_score": float("nan"), "reward_extra_info": {}}
