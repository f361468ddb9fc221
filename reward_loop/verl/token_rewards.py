"""The distribution of a reward over the tokens of a response: at the end, or in parts at turns and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from reward_loop._util.text import shorten
from reward_loop.scoring.dense_rewards import are_numbers
from reward_loop.types import PART_KEYS

__all__ = ["has_parts", "misfit", "place"]


def has_parts(info: Mapping[str, Any]) -> bool:
    """Returns whether a function returned ``turn_level_scores`` or ``token_level_scores``."""
    return any(info.get(name) is not None for name in PART_KEYS)


def misfit(response_mask: torch.Tensor, info: Mapping[str, Any]) -> str | None:
    """Returns why the parts of a reward cannot be placed, or ``None`` if they can.

    Parts must be finite numbers, one for each token or turn. The arguments are those of `place`.
    """
    for name, where in _places(response_mask).items():
        parts = info.get(name)
        if parts is None:
            continue
        if not are_numbers(parts):
            return f"{name} must be a list of finite numbers; got {shorten(parts)}"
        if len(parts) != len(where):
            what = "tokens" if name == "token_level_scores" else "turns"
            return f"the function returned {len(parts)} {name}, and the response has {len(where)} {what}"
    return None


def place(reward: float, response_mask: torch.Tensor, info: Mapping[str, Any]) -> torch.Tensor:
    """Returns the reward of each token of a response.

    Args:
        reward: the sum of the rewards of all tokens. The difference to the sum of the parts goes to the last token.
        response_mask: shape (tokens,): 1 for tokens of the policy, 0 for tokens of a tool or the user. A turn is a run
            of ones; its reward goes to its last token.
        info: the values that the function returned; see `PART_KEYS`.

    Returns:
        A float32 tensor of shape (tokens,).

    Raises:
        ValueError: the parts are not one finite number for each token or turn.
    """
    if problem := misfit(response_mask, info):
        raise ValueError(problem)
    placed = torch.zeros(len(response_mask), dtype=torch.float32)
    for name, where in _places(response_mask).items():
        if (parts := info.get(name)) is not None:
            placed[where] += torch.as_tensor(parts, dtype=torch.float32)
    placed[-1] += reward - placed.sum()
    return placed


def _places(response_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the token positions for each key of `PART_KEYS`: all tokens, and the last token of each turn."""
    after = torch.cat([response_mask[1:], response_mask.new_zeros(1)])
    ends = ((response_mask > 0) & (after == 0)).nonzero().flatten()
    return {"token_level_scores": torch.arange(len(response_mask)), "turn_level_scores": ends}
