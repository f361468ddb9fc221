"""slime and miles: their normalisation of rewards, without the samples that slime_reward.py has removed."""

from collections import defaultdict
from statistics import fmean, stdev


def normalise(args, samples):
    """``--custom-reward-post-process-path``: as slime, but a removed sample is not part of its group's baseline."""
    raw = [0.0 if one.reward is None and one.remove_sample else float(one.get_reward_value(args)) for one in samples]
    divides = args.advantage_estimator in ("grpo", "gspo", "cispo")
    if not args.rewards_normalization or not (divides or args.advantage_estimator == "reinforce_plus_plus_baseline"):
        return raw, raw
    rollouts = [one.rollout_id for one in samples if one.rollout_id is not None]
    if len(set(rollouts)) < len(rollouts) or any(one.group_index is None for one in samples):
        raise ValueError("several samples of one rollout, or no group_index: leave out this option")
    groups = defaultdict(list)
    for i, one in enumerate(samples):
        if not one.remove_sample:
            groups[one.group_index].append(i)
    normalised = [0.0] * len(raw)
    for members in groups.values():
        rewards = [raw[i] for i in members]
        is_scaled = divides and args.grpo_std_normalization and len(rewards) > 1
        scale = stdev(rewards) + 1e-6 if is_scaled else 1.0
        for i in members:
            normalised[i] = (raw[i] - fmean(rewards)) / scale
    return raw, normalised
