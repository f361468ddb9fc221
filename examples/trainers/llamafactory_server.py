"""LLaMA-Factory's PPO: answers its requests with scores from `reward-loop serve`. Start it with uvicorn."""

import os

import httpx
from fastapi import FastAPI, HTTPException, Request

CLIENT = httpx.AsyncClient(timeout=httpx.Timeout(3600, pool=None), limits=httpx.Limits(max_connections=256))
URL = os.environ.get("REWARD_URL", "http://127.0.0.1:8090/score")

app = FastAPI()


@app.post("/")
async def scores(request: Request):
    """Return the scores of texts: prompts with their responses, and special tokens."""
    samples = [{"solution_str": text} for text in (await request.json())["messages"]]
    headers = {name: request.headers[name] for name in ("authorization",) if name in request.headers}
    reply = await CLIENT.post(URL, json={"samples": samples}, headers=headers)
    if reply.is_error:
        raise HTTPException(reply.status_code, reply.text)
    results = reply.json()["results"]
    if failed := [result["error"] for result in results if result["score"] is None]:
        raise HTTPException(500, f"{failed[0]}. LLaMA-Factory needs a number: serve with -O on_failed=default")
    return {"scores": [result["score"] for result in results]}
