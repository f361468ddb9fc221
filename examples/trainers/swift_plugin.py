"""ms-swift: the reward ``reward_loop``, from `reward-loop serve`."""

import os
from collections import Counter

import httpx
from swift.rewards import AsyncORM, orms

URL = os.environ.get("REWARD_URL", "http://127.0.0.1:8090/score")

GROUND_TRUTH = "solution"
"""The column with the reference answers."""

INTERNAL = {"messages", "prompt_id", "request_id", "response_token_ids", "rollout_infos", "trainer_state"}
"""Columns that ms-swift adds to those of the data set."""


class RewardLoop(AsyncORM):
    """Scores the completions of a batch; ``None`` for one without a score."""

    async def __call__(self, completions, **columns):
        lists = {name: column for name, column in columns.items() if isinstance(column, list) and name not in INTERNAL}
        sizes = Counter(columns["prompt_id"]).values()
        whole = not any(size % self.args.num_generations for size in sizes)
        # ms-swift does not pass whether this is an evaluation: in one, all groups have exactly this size.
        whole = whole or set(sizes) == {getattr(self.args, "num_generations_eval", None)}
        samples = []
        for i, completion in enumerate(completions):
            row = {name: column[i] for name, column in lists.items()}
            # A part of a group has no name: a service that compares the samples of a group refuses it.
            group = columns["prompt_id"][i] if whole else None
            samples.append(
                {
                    "solution_str": completion,
                    "ground_truth": row[GROUND_TRUTH],
                    "extra_info": row,
                    "uid": columns["request_id"][i],
                    "prompt": columns["messages"][i][:-1],
                    "step": columns["trainer_state"].global_step + 1,  # ms-swift counts the steps that have ended
                    "group": group,
                }
            )
        async with httpx.AsyncClient(timeout=3600) as client:
            reply = await client.post(URL, json={"samples": samples})
        if reply.is_error:
            raise RuntimeError(f"{URL}: {reply.text}")
        return [result["score"] for result in reply.json()["results"]]


orms["reward_loop"] = RewardLoop
