"""Changes the rewards of a batch after its rollouts were scored: dense rewards that do not fit, post-processing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import transfer_queue as tq

from reward_loop.types import Reward
from reward_loop.verl.token_rewards import misfit
from reward_loop.verl.tq_rewards import keys_with_parts, read_groups, write_rewards
from reward_loop.verl.trajectory_keys import session_of, uid_of
from reward_loop.verl.workers import RewardWorkers

__all__ = ["post_process", "reject_parts"]


def reject_parts(
    batch: Any, infos: Mapping[str, dict[str, Any]], workers: RewardWorkers, examined: Collection[str]
) -> bool:
    """Turns samples into failed samples if their ``turn_level_scores`` or ``token_level_scores`` do not fit.

    All outputs of such a session get the new reward.

    Args:
        batch: the rows.
        infos: their ``reward_extra_info`` by key.
        workers: the reward workers, which count the failures and apply the policy.
        examined: the uids of groups that were examined before; they are left out.

    Returns:
        whether there was any such sample.
    """
    keys = [key for key in keys_with_parts(infos) if uid_of(key) not in examined]
    if not keys:
        return False
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["response_mask"])
    masks = data["response_mask"].unbind()
    problems = {key: misfit(mask, infos[key]) for key, mask in zip(keys, masks, strict=True)}
    rejected = {key: problem for key, problem in problems.items() if problem is not None}
    rewards = [Reward(reward_score=0.0, reward_extra_info=infos[key]) for key in rejected]
    failed = workers.reject(rewards, _names(rejected), list(rejected.values()), len(keys) - len(rejected))
    if rejected:
        write_rewards(batch, list(rejected), failed)
    return bool(rejected)


def post_process(batch: Any, workers: RewardWorkers) -> None:
    """Replaces the rewards of each group with the results of the function's ``post_process_scores``.

    Groups that have been post-processed already stay as they are.
    """
    keys, groups = read_groups(batch)
    if not keys:
        return
    processed = workers.post_process(groups, [_names(group) for group in keys])
    flat = [key for group in keys for key in group]
    raw_scores = {key: r["reward_score"] for key, r in zip(flat, [r for g in groups for r in g], strict=True)}
    write_rewards(batch, flat, [reward for group in processed for reward in group], raw_scores)


def _names(keys: Iterable[str]) -> list[str]:
    """Returns the names that the samples of these keys have in messages and records: ``{uid}_{session}``."""
    return [session_of(key)[0] for key in keys]
