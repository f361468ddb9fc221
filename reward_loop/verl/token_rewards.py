"""Where in a response its reward goes: at the end, or in parts at turns and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from reward_loop._util.text import shorten
from reward_loop.scoring.dense_rewards import are_numbers
from reward_loop.types import PART_KEYS

__all__ = ["has_parts", "misfit", "place"]


def has_parts(info: Mapping[str, Any]) -> bool:
    """Whether a function said where parts of its reward go."""
    return any(info.get(name) is not None for name in PART_KEYS)


def misfit(response_mask: torch.Tensor, info: Mapping[str, Any]) -> str | None:
    """Why the parts of a reward cannot be placed, or ``None``: they are no numbers, or not one for each token or turn.

    The arguments are those of `place`.
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
    """The reward of each token of a response.

    Args:
        reward: what they add up to; what the parts leave goes to the last token.
        response_mask: of shape (tokens,): 1 where the policy wrote the token, 0 where a tool or the user did. A turn is
            a run of ones, and its reward goes to its last token.
        info: what the function returned; see `PART_KEYS`.

    Returns:
        A float32 tensor of shape (tokens,).

    Raises:
        ValueError: there is not one finite number for each token, or turn.
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
    """The positions of the tokens, and of the last tokens of turns, by the key for their parts."""
    after = torch.cat([response_mask[1:], response_mask.new_zeros(1)])
    ends = ((response_mask > 0) & (after == 0)).nonzero().flatten()
    return {"token_level_scores": torch.arange(len(response_mask)), "turn_level_scores": ends}
