"""The reward: a reward model's verdict over HTTP, mixed with a rule about the form of the answer."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import aiohttp

FORMAT_WEIGHT = 0.1
"""The share of the score that the form of an answer decides; the rest is the reward model's."""

_sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
_models: dict[str, asyncio.Task[str]] = {}


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    reward_router_address: str,
    reward_model_tokenizer: Any,
    model: str | None = None,
    latency_s: float = 0.0,
) -> dict[str, float]:
    """How likely the answer is right, in the reward model's view, and whether it consists of digits alone.

    The reward model is small and quick. `latency_s` makes it as slow as a large one: in training, a verdict takes that
    many seconds longer on average, drawn at random between half of it and one and a half times.

    `acc` says whether the answer is the reference's. It is for information: the score does not depend on it. verl makes
    it the headline of a validation.
    """
    conversation = [
        {"role": "user", "content": extra_info["question"]},
        {"role": "assistant", "content": solution_str},
    ]
    if latency_s and extra_info["split"] == "train":
        await asyncio.sleep(random.uniform(0.5, 1.5) * latency_s)
    logit = await _classify(
        reward_router_address,
        model or await _served_model(reward_router_address),
        reward_model_tokenizer.apply_chat_template(conversation, tokenize=False),
    )
    right = _sigmoid(logit)
    well_formed = float(solution_str.isascii() and solution_str.isdigit())
    return {
        "score": (1 - FORMAT_WEIGHT) * right + FORMAT_WEIGHT * well_formed,
        "reward_model": right,
        "format": well_formed,
        "acc": float(solution_str == ground_truth),
    }


async def _classify(address: str, model: str, text: str) -> float:
    body = {"model": model, "input": text, "use_activation": False}  # the raw logit, in vLLM's dialect
    answer = await _request("POST", f"http://{address}/classify", json=body)
    return answer["data"][0]["probs"][0]


async def _served_model(address: str) -> str:
    """The name of the model behind the router. It is asked for once, however many samples wait for it."""
    task = _models.get(address)
    # A failed question is asked again; so is one that belonged to an event loop that is gone.
    if task is None or (task.done() and (task.cancelled() or task.exception())) or task.get_loop().is_closed():
        task = _models[address] = asyncio.create_task(_ask_for_model(address))
    return await asyncio.shield(task)


async def _ask_for_model(address: str) -> str:
    answer = await _request("GET", f"http://{address}/v1/models")
    return answer["data"][0]["id"]


async def _request(method: str, url: str, **options: Any) -> Any:
    async with _session().request(method, url, **options) as response:
        if response.status != 200:
            raise RuntimeError(f"{method} {url} answered {response.status}: {(await response.text())[:500]}")
        return await response.json()


def _session() -> aiohttp.ClientSession:
    """One session for each event loop: connections are reused from sample to sample."""
    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        for ended in [other for other in _sessions if other.is_closed()]:
            del _sessions[ended]
        # The reward loop sets the deadline of a sample, and the reward model's server the size of a batch.
        session = _sessions[loop] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3), timeout=aiohttp.ClientTimeout(total=None)
        )
    return session


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
