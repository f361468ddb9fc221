"""slime and miles: rewards from `reward-loop serve`, and their normalisation without the samples that have none."""

import os
from collections import defaultdict
from statistics import fmean, stdev

import httpx

# More samples than connections wait here, and not at the service, which would refuse them.
CLIENT = httpx.AsyncClient(timeout=httpx.Timeout(3600, pool=None), limits=httpx.Limits(max_connections=256))
URL = os.environ.get("REWARD_URL", "http://127.0.0.1:8090/score")


async def custom_rm(args, sample, **_):
    """``--custom-rm-path``: return the reward of a sample, with ``--group-rm`` those of a group."""
    given = sample if isinstance(sample, list) else [sample]
    reply = await CLIENT.post(URL, json={"samples": [_row(one, args.group_rm) for one in given]})
    if reply.is_error:
        raise RuntimeError(f"{URL}: {reply.text}")
    rewards = []
    for one, result in zip(given, reply.json()["results"], strict=True):
        # slime sets the loss mask of removed samples to zeros. A sample that was removed here may be scored again.
        one.remove_sample = result["score"] is None or (one.remove_sample and "reward_loop" not in one.metadata)
        one.metadata["reward_loop"] = result
        rewards.append(result["score"] or 0.0)
    return rewards if isinstance(sample, list) else rewards[0]


def _row(sample, is_group):
    return {
        "solution_str": sample.response,
        "ground_truth": sample.label,
        "extra_info": {name: value for name, value in sample.metadata.items() if name != "reward_loop"},
        "prompt": sample.prompt,
        "response_ids": sample.tokens[len(sample.tokens) - sample.response_length :],
        "is_truncated": sample.status.value == "truncated",
        "group": "the prompt" if is_group else None,
    }


def normalise(args, samples):
    """``--custom-reward-post-process-path``: as slime, but a removed sample is not part of its group's baseline."""
    raw = [0.0 if one.reward is None and one.remove_sample else float(one.get_reward_value(args)) for one in samples]
    estimator = args.advantage_estimator
    if estimator not in ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline") or not args.rewards_normalization:
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
        scale = 1.0
        if args.grpo_std_normalization and estimator != "reinforce_plus_plus_baseline":
            scale = (stdev(rewards) if len(rewards) > 1 else 0.0) + 1e-6
        for i in members:
            normalised[i] = (raw[i] - fmean(rewards)) / scale
    return raw, normalised
