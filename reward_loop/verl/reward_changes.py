"""Changes the rewards of a batch after its rollouts were scored: post-processing, and dense rewards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from reward_loop._util.text import shorten
from reward_loop.scoring.results import are_numbers
from reward_loop.types import PART_KEYS, Reward
from reward_loop.verl.reward_metrics import Rewards
from reward_loop.verl.tq_rows import read_rewards, read_rows, write_rewards, write_rows
from reward_loop.verl.trajectory_keys import final_outputs, session_of, uid_of
from reward_loop.verl.workers import RewardWorkers


def reject_parts(batch: Any, rewards: Rewards, workers: RewardWorkers, examined: Collection[str]) -> Rewards:
    """Turn samples into failed samples if their ``turn_level_scores`` or ``token_level_scores`` do not fit.

    Also if the reward is not finite: an agent loop that sets its reward itself may set any number.
    All outputs of such a session get the new reward. The workers count the failures and apply the policy. Groups that
    were examined before are left out. Returns the rewards after the change.
    """
    infinite = [
        key
        for key in final_outputs(rewards)
        if not rewards[key].is_masked and not math.isfinite(rewards[key].reward) and uid_of(key) not in examined
    ]
    with_parts = [key for key in _keys_with_parts(rewards) if uid_of(key) not in examined and key not in infinite]
    keys = [*with_parts, *infinite]
    if not keys:
        return rewards
    masks = read_rows(with_parts, batch.partition_id, "response_mask")
    problems = {key: misfit(mask, rewards[key].info) for key, (mask,) in zip(with_parts, masks, strict=True)}
    for key in infinite:
        problems[key] = f"the agent loop set the reward {rewards[key].reward}, which is not a finite number"
    rejected = {key: problem for key, problem in problems.items() if problem is not None}
    before = [Reward(reward_score=0.0, reward_extra_info=dict(rewards[key].info)) for key in rejected]
    # Also if none is rejected: samples that fit count in the bound on the share of failures.
    failed = workers.reject(before, _names(rejected), list(rejected.values()), len(keys) - len(rejected))
    if not rejected:
        return rewards
    write_rewards(batch, list(rejected), failed)
    return read_rewards(batch)


def post_process(batch: Any, rewards: Rewards, workers: RewardWorkers) -> Rewards:
    """Replace the rewards of each group with the results of the function's ``post_process_scores``.

    Groups that have been post-processed already stay as they are. Returns the rewards after the change.
    """
    by_group: dict[str, list[str]] = defaultdict(list)
    # In the order of the rollouts, not in that in which rewards arrived.
    for key in sorted(final_outputs(rewards), key=_session_number):
        by_group[uid_of(key)].append(key)
    groups = [keys for keys in by_group.values() if not any(rewards[key].post_processed for key in keys)]
    if not groups:
        return rewards
    before = [
        [Reward(reward_score=rewards[k].reward, reward_extra_info=dict(rewards[k].info)) for k in keys]
        for keys in groups
    ]
    after = workers.post_process(before, [_names(keys) for keys in groups])
    flat = [key for keys in groups for key in keys]
    raw_scores = {key: rewards[key].reward for key in flat}
    write_rewards(batch, flat, [reward for group in after for reward in group], raw_scores)
    return read_rewards(batch)


def place_parts(batch: Any, rewards: Rewards) -> None:
    """Distribute rewards over turns and tokens where the function returned scores for them."""
    keys = _keys_with_parts(rewards)
    masks = read_rows(keys, batch.partition_id, "response_mask")
    placed = [place(rewards[key].reward, mask, rewards[key].info) for key, (mask,) in zip(keys, masks, strict=True)]
    write_rows(keys, batch.partition_id, rm_scores=placed)


def _keys_with_parts(rewards: Rewards) -> list[str]:
    """Return the last outputs of unmasked sessions with ``turn_level_scores`` or ``token_level_scores``."""
    return [
        key
        for key in final_outputs(rewards)
        if not rewards[key].is_masked and any(rewards[key].info.get(name) is not None for name in PART_KEYS)
    ]


def misfit(response_mask: torch.Tensor, info: Mapping[str, Any]) -> str | None:
    """Return why the parts of a reward cannot be placed, or ``None`` if they can.

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
    """Return the reward of each token of a response.

    Args:
        reward: the sum of the rewards of all tokens. The difference to the sum of the parts goes to the last token.
        response_mask: shape (tokens,): 1 for tokens of the policy, 0 for tokens of a tool or the user. A turn is a run
            of ones; its reward goes to its last token.
        info: the values that the function returned; see `PART_KEYS`. `misfit` must return ``None`` for them.

    Returns:
        A float32 tensor of shape (tokens,).
    """
    placed = torch.zeros(len(response_mask), dtype=torch.float32)
    for name, where in _places(response_mask).items():
        if (parts := info.get(name)) is not None:
            placed[where] += torch.as_tensor(parts, dtype=torch.float32)
    placed[-1:] += reward - placed.sum()  # a response may have no tokens
    return placed


def _places(response_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the token positions for each key of `PART_KEYS`: all tokens, and the last token of each turn."""
    after = torch.cat([response_mask[1:], response_mask.new_zeros(1)])
    ends = ((response_mask > 0) & (after == 0)).nonzero().flatten()
    return {"token_level_scores": torch.arange(len(response_mask)), "turn_level_scores": ends}


def _session_number(key: str) -> int:
    return int(session_of(key)[0].rsplit("_", 1)[1])


def _names(keys: Iterable[str]) -> list[str]:
    """Return the names that the samples of these keys have in messages and records: ``{uid}_{session}``."""
    return [session_of(key)[0] for key in keys]
