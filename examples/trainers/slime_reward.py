"""slime and miles: rewards from `reward-loop serve`; slime_normalise.py has their normalisation."""

import asyncio
import os

import httpx

# More samples than connections wait here, and not at the service, which would refuse them.
CLIENT = httpx.AsyncClient(timeout=httpx.Timeout(3600, pool=None), limits=httpx.Limits(max_connections=256))
URL = os.environ.get("REWARD_URL", "http://127.0.0.1:8090/score")
PAUSE_S = 1.0
"""Before a full service is asked again."""


async def custom_rm(args, sample, **_):
    """``--custom-rm-path``: return the reward of a sample, with ``--group-rm`` those of a group."""
    given = sample if isinstance(sample, list) else [sample]
    body = {"samples": [_row(one, args.group_rm) for one in given]}
    reply = await CLIENT.post(URL, json=body)
    while reply.status_code == 429:  # other groups fill the service
        await asyncio.sleep(PAUSE_S)
        reply = await CLIENT.post(URL, json=body)
    if reply.is_error:
        raise RuntimeError(f"{URL}: {reply.text}")
    results = reply.json()["results"]
    for one, result in zip(given, results, strict=True):
        # slime sets the loss mask of removed samples to zeros. A sample that was removed here may be scored again.
        one.remove_sample = result["score"] is None or (one.remove_sample and "reward_loop" not in one.metadata)
        one.metadata["reward_loop"] = result
    rewards = [result["score"] or 0.0 for result in results]
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
