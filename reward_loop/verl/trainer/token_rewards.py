"""The reward of each token of a response: verl trains on one number a token."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def turns_of(response_mask: Sequence[int]) -> list[int]:
    """Return the number of tokens of each part by the policy (1 in the mask) and by the environment (0) in turn.

    Begins with the policy, whose first part may be empty.
    """
    parts = [(bool(written), len(list(part))) for written, part in itertools.groupby(response_mask)]
    lengths = [length for _, length in parts]
    return [0, *lengths] if parts and not parts[0][0] else lengths


def token_rewards(reward: float, response_mask: Sequence[int], info: Mapping[str, Any]) -> torch.Tensor:
    """Return the reward of each token of a response.

    Args:
        reward: the sum of the rewards of all tokens. The difference to the sum of the parts goes to the last token that
            the policy wrote: tokens of a tool or the user, which may stand behind it, are not trained on.
        response_mask: 1 for tokens of the policy, 0 for tokens of a tool or the user.
        info: what the function returned; see `PART_KEYS`. It has one score for each token or turn. A turn's score goes
            to its last token.

    Returns:
        A float32 tensor of shape (tokens,).
    """
    mask = torch.as_tensor(response_mask)
    placed = torch.zeros(len(mask), dtype=torch.float32)
    ends = ((mask > 0) & (torch.cat([mask[1:], mask.new_zeros(1)]) == 0)).nonzero().flatten()
    if (parts := info.get("token_level_scores")) is not None:
        placed += torch.as_tensor(parts, dtype=torch.float32)
    if (parts := info.get("turn_level_scores")) is not None:
        placed[ends] += torch.as_tensor(parts, dtype=torch.float32)
    # A response may have no token, or none of the policy.
    last = ends[-1:] if len(ends) else slice(-1, None)
    placed[last] += reward - placed.sum()
    return placed
