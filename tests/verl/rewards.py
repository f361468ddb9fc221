"""Reward functions for runs of verl's trainer. They write what they return to the file ``$REWARD_LOG``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import zlib
from pathlib import Path
from typing import Any

import psutil

from reward_loop.client import classify


def _log(**row: Any) -> None:
    with open(os.environ["REWARD_LOG"], "a") as file:
        file.write(json.dumps(row) + "\n")


def number(solution_str: str) -> int:
    """A number that depends on nothing but the response."""
    return zlib.crc32(solution_str.encode())


def halve_all_but_the_best(scores: list[float]) -> list[float]:
    return [score if score == max(scores) else score / 2 for score in scores]


class Mixed:
    """Scores most responses; has no opinion on some, and fails on others. The keys of its extra info differ. In
    training, who is not the best of the group gets half."""

    async def compute_score(self, solution_str: str, ground_truth: str, extra_info: dict) -> dict | None:
        value = number(solution_str)
        score: float | None = (value % 100) / 100
        outcome = "scored"
        if value % 7 == 0:
            score, outcome = None, "unscored"
        elif value % 7 == 1:
            score, outcome = None, "failed"
        split = extra_info["split"]
        _log(output=solution_str, gts=ground_truth, score=score, outcome=outcome, split=split)
        if outcome == "failed":
            raise ValueError(f"no score for {value}")
        if score is None:
            return None
        return {"score": score, f"key_{value % 3}": value % 10, "text": "seen"}

    def post_process_scores(self, scores: list[float]) -> list[float]:
        return halve_all_but_the_best(scores)


class Slow(Mixed):
    """As :class:`Mixed`, after up to a second, and after much longer for the first response of training."""

    async def compute_score(self, solution_str: str, ground_truth: str, extra_info: dict) -> dict | None:
        first = Path(os.environ["REWARD_LOG"]).with_name("first")
        if extra_info["split"] == "train" and not first.exists():
            first.touch()
            await asyncio.sleep(5)
        await asyncio.sleep(number(solution_str) % 11 / 10)
        return await super().compute_score(solution_str, ground_truth, extra_info)


class Overtaken(Mixed):
    """As :class:`Mixed`, but the first 32 samples are judged only when 8 more have been generated after them."""

    def __init__(self) -> None:
        self._seen = 0
        self._overtaken = asyncio.Event()

    async def compute_score(self, solution_str: str, ground_truth: str, extra_info: dict) -> dict | None:
        self._seen += 1
        if self._seen == 40:
            self._overtaken.set()
        if self._seen <= 32:
            await self._overtaken.wait()
        return await super().compute_score(solution_str, ground_truth, extra_info)


def several(outputs: list[str]) -> list[dict[str, float]]:
    """Two rewards for each response of a group, on different scales: one of its own, and its rank."""
    order = sorted(outputs, key=number)
    return [{"value": 100.0 * (number(text) % 10), "rank": float(order.index(text))} for text in outputs]


async def compared(
    solution_strs: list[str], ground_truths: list[str], extra_infos: list[dict]
) -> list[dict[str, float] | None]:
    """Sees a whole group."""
    results: list[dict[str, float] | None] = []
    for text, truth, info, own in zip(solution_strs, ground_truths, extra_infos, several(solution_strs), strict=True):
        score = sum(own.values())
        _log(output=text, gts=truth, score=score, outcome="scored", split=info["split"], group=len(solution_strs))
        results.append({"score": score, **own, "turn_level_scores": [score]})
    return results


def plain(solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """A sync function that scores everything."""
    score = (number(solution_str) % 100) / 100
    _log(output=solution_str, gts=ground_truth, score=score, outcome="scored", split=extra_info["split"])
    return score


def rare(solution_str: str) -> float:
    """Rewards one response in four or so, so that many groups get no reward at all."""
    return float(number(solution_str) % 4 == 0)


def _kill_once(pid: int, marker: str) -> None:
    flag = Path(os.environ["REWARD_LOG"]).with_name(marker)
    try:
        flag.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(pid, signal.SIGKILL)


def processes_with(*words: str) -> list[int]:
    """The processes with all these words in their command lines."""
    found = psutil.process_iter(["cmdline"])
    return [process.pid for process in found if all(word in " ".join(process.info["cmdline"] or []) for word in words)]


async def judged(
    solution_str: str, ground_truth: str, extra_info: dict, reward_router_address: str, model: str, policy: str
) -> float:
    """Asks the reward model. At its 20th sample it kills the model server, and at its 30th the reward worker itself;
    from the 128th on it presses Ctrl-C on the command that trains ``policy``, again and again."""
    lines = Path(os.environ["REWARD_LOG"])
    seen = len(lines.read_text().splitlines()) if lines.exists() else 0
    if seen >= 20:
        for pid in processes_with("reward_loop.router.servers.embedded", model):
            _kill_once(pid, "killed-server")
    if seen >= 30:
        _kill_once(os.getpid(), "killed-worker")
    if seen >= 128:
        for pid in processes_with("reward_loop.verl.main_ppo", policy):
            os.kill(pid, signal.SIGINT)
    score = await classify(reward_router_address, solution_str or " ", timeout=None)
    assert isinstance(score, float)
    _log(output=solution_str, gts=ground_truth, score=score, outcome="scored", split=extra_info["split"])
    return score


async def watched(solution_str: str, ground_truth: str, extra_info: dict, reward_router_address: str) -> float:
    """Asks the reward model, and writes down from when to when, and whether the rollout slept meanwhile."""
    import ray

    rollout = ray.get_actor("cpu_rollout_server_0")
    began, slept = time.time(), await rollout.is_sleeping.remote()
    score = await classify(reward_router_address, solution_str or " ", timeout=None)
    assert isinstance(score, float)
    times = {"began": began, "ended": time.time(), "rollout_slept": slept and await rollout.is_sleeping.remote()}
    _log(output=solution_str, gts=ground_truth, score=score, outcome="scored", split=extra_info["split"], **times)
    return score


def broken(solution_str: str) -> float:
    """Never scores anything."""
    raise RuntimeError(f"the judge is on strike, {len(solution_str)} characters unread")
