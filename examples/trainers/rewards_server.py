"""OpenRLHF and LLaMA-Factory: answers their requests with rewards from `reward-loop serve`. Start it with uvicorn."""

import json
import os

import httpx
from fastapi import FastAPI, HTTPException, Request, Response

CLIENT = httpx.AsyncClient(timeout=httpx.Timeout(3600, pool=None), limits=httpx.Limits(max_connections=256))
URL = os.environ.get("REWARD_URL", "http://127.0.0.1:8090/score")

LOGGED = ()
"""The numbers of your function that OpenRLHF logs. It needs the same keys from each request."""

END = ("<|im_end|>", "<|endoftext|>", "</s>")
"""Special tokens at the end of a response, which OpenRLHF sends."""

app = FastAPI()


async def results_of(request, samples):
    """Return the results of samples, which all have a score."""
    if not samples:  # OpenRLHF sends empty lists to all but the first of several URLs
        return []
    headers = {name: request.headers[name] for name in ("authorization",) if name in request.headers}
    reply = await CLIENT.post(URL, json={"samples": samples}, headers=headers)
    if reply.is_error:
        raise HTTPException(reply.status_code, reply.text)
    results = reply.json()["results"]
    if failed := [result["error"] for result in results if result["score"] is None]:
        raise HTTPException(500, f"{failed[0]}. The trainer needs a number: serve with -O on_failed=default")
    return results


@app.post("/llamafactory")
async def scores(request: Request):
    """Return the scores of texts: prompts with their responses, and special tokens."""
    results = await results_of(request, [{"solution_str": text} for text in (await request.json())["messages"]])
    return {"scores": [result["score"] for result in results]}


@app.post("/openrlhf")
async def rewards(request: Request):
    """Return rewards, scores (by which OpenRLHF filters groups) and logs of the rollouts."""
    body = await request.json()
    samples = []
    for query, prompt, label in zip(body["query"], body["prompts"], body["labels"], strict=True):
        if not query.startswith(prompt):
            raise HTTPException(422, "a query does not begin with its prompt: the prompt was too long")
        response = query.removeprefix(prompt).rstrip()
        while ends := [end for end in END if response.endswith(end)]:
            response = response.removesuffix(ends[0]).rstrip()
        samples.append({"solution_str": response, "ground_truth": label, "prompt": prompt})
    results = await results_of(request, samples)
    found = [result["score"] for result in results]
    logs = {name: [result["components"].get(name, float("nan")) for result in results] for name in LOGGED}
    content = json.dumps({"rewards": found, "scores": found, "extra_logs": logs})
    return Response(content, media_type="application/json")  # NaN, which a tensor can have; null cannot be in one
