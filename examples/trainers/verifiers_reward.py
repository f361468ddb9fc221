"""verifiers: a reward of a task, from `reward-loop serve`."""

import asyncio
import os

import httpx

CLIENT = httpx.AsyncClient(timeout=httpx.Timeout(3600, pool=None), limits=httpx.Limits(max_connections=256))
URL = os.environ.get("REWARD_URL", "http://127.0.0.1:8090/score")
PAUSE_S = 1.0
"""Before a full service is asked again."""


async def reward(task, trace):
    """Return the reward of a trace; the other numbers of the function become its metrics.

    A trace without a score is an error, which verifiers stores in the trace, and then excludes the trace.
    """
    data = task.model_dump(mode="json")
    sample = {
        "solution_str": trace.last_reply,
        "ground_truth": data["answer"],
        "extra_info": data,
        "uid": trace.id,
        "prompt": data["prompt"],
        "response_length": trace.num_output_tokens,
    }
    reply = await CLIENT.post(URL, json=sample)
    while reply.status_code == 429:  # other processes fill the service
        await asyncio.sleep(PAUSE_S)
        reply = await CLIENT.post(URL, json=sample)
    if reply.is_error:
        raise RuntimeError(f"{URL}: {reply.text}")
    result = reply.json()
    if result["score"] is None:
        raise RuntimeError(result["error"])
    trace.record_metrics(result["components"])
    return result["score"]
