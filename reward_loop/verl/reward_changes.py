"""Changes the rewards of a batch after its rollouts were scored: post-processing, and dense rewards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from reward_loop.types import Reward
from reward_loop.verl.reward_metrics import TrajectoryReward
from reward_loop.verl.token_rewards import has_parts, misfit, place
from reward_loop.verl.tq_batches import read_rows, write_rows
from reward_loop.verl.tq_rewards import read_rewards, write_rewards
from reward_loop.verl.trajectory_keys import final_outputs, session_of, uid_of
from reward_loop.verl.workers import RewardWorkers

__all__ = ["place_parts", "post_process", "reject_parts"]

Rewards = Mapping[str, TrajectoryReward]
"""The rewards of a batch by key of the trajectory, see `read_rewards`."""


def reject_parts(batch: Any, rewards: Rewards, workers: RewardWorkers, examined: Collection[str]) -> Rewards:
    """Turns samples into failed samples if their ``turn_level_scores`` or ``token_level_scores`` do not fit.

    All outputs of such a session get the new reward.

    Args:
        batch: the rows.
        rewards: their rewards.
        workers: the reward workers, which count the failures and apply the policy.
        examined: the uids of groups that were examined before; they are left out.

    Returns:
        the rewards after the change.
    """
    keys = [key for key in _keys_with_parts(rewards) if uid_of(key) not in examined]
    if not keys:
        return rewards
    masks = read_rows(keys, batch.partition_id, "response_mask")
    problems = {key: misfit(mask, rewards[key].info) for key, (mask,) in zip(keys, masks, strict=True)}
    rejected = {key: problem for key, problem in problems.items() if problem is not None}
    before = [Reward(reward_score=0.0, reward_extra_info=dict(rewards[key].info)) for key in rejected]
    failed = workers.reject(before, _names(rejected), list(rejected.values()), len(keys) - len(rejected))
    if not rejected:
        return rewards
    write_rewards(batch, list(rejected), failed)
    return read_rewards(batch)


def post_process(batch: Any, rewards: Rewards, workers: RewardWorkers) -> Rewards:
    """Replaces the rewards of each group with the results of the function's ``post_process_scores``.

    Groups that have been post-processed already stay as they are. Returns the rewards after the change.
    """
    by_group: dict[str, list[str]] = defaultdict(list)
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
    """Distributes rewards over turns and tokens where the function returned scores for them."""
    keys = _keys_with_parts(rewards)
    masks = read_rows(keys, batch.partition_id, "response_mask")
    placed = [place(rewards[key].reward, mask, rewards[key].info) for key, (mask,) in zip(keys, masks, strict=True)]
    write_rows(keys, batch.partition_id, rm_scores=placed)


def _keys_with_parts(rewards: Rewards) -> list[str]:
    """Returns the last outputs of unmasked sessions with ``turn_level_scores`` or ``token_level_scores``."""
    return [key for key in final_outputs(rewards) if has_parts(rewards[key].info) and not rewards[key].is_masked]


def _session_number(key: str) -> int:
    return int(session_of(key)[0].rsplit("_", 1)[1])


def _names(keys: Iterable[str]) -> list[str]:
    """Returns the names that the samples of these keys have in messages and records: ``{uid}_{session}``."""
    return [session_of(key)[0] for key in keys]
