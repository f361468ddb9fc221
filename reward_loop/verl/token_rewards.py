"""Where in a response its reward goes: at the end, or in parts at turns and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from reward_loop.types import PART_KEYS

__all__ = ["has_parts", "place"]


def has_parts(info: Mapping[str, Any]) -> bool:
    """Whether a function said where parts of its reward go."""
    return any(info.get(name) is not None for name in PART_KEYS)


def place(reward: float, response_mask: torch.Tensor, info: Mapping[str, Any]) -> torch.Tensor:
    """The reward of each token of a response.

    Args:
        reward: what they add up to; what the parts leave goes to the last token.
        response_mask: of shape (tokens,): 1 where the policy wrote the token, 0 where a tool or the user did. A turn is
            a run of ones, and its reward goes to its last token.
        info: what the function returned; see `PART_KEYS`.

    Returns:
        A float32 tensor of shape (tokens,).

    Raises:
        ValueError: there is not one part for each token, or turn.
    """
    placed = torch.zeros(len(response_mask), dtype=torch.float32)
    after = torch.cat([response_mask[1:], response_mask.new_zeros(1)])
    ends = ((response_mask > 0) & (after == 0)).nonzero().flatten()
    places = {"token_level_scores": torch.arange(len(response_mask)), "turn_level_scores": ends}
    for name, where in places.items():
        if (parts := info.get(name)) is None:
            continue
        if len(parts) != len(where):
            what = "tokens" if name == "token_level_scores" else "turns"
            raise ValueError(f"the function returned {len(parts)} {name}, and the response has {len(where)} {what}")
        placed[where] += torch.as_tensor(parts, dtype=torch.float32)
    placed[-1] += reward - placed.sum()
    return placed
