"""Reward functions for runs of verl's trainer. They write what they return to the file ``$REWARD_LOG``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from reward_loop.agent import queue_metrics
from reward_loop.client import chat_complete, classify
from reward_loop.errors import TransientError


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

    async def compute_score(
        self,
        solution_str: str,
        ground_truth: str,
        extra_info: dict,
        prompt: list[dict[str, str]] | None = None,
        response_ids: list[int] | None = None,
        response_length: int | None = None,
        is_truncated: bool | None = None,
        global_steps: int | None = None,
        training_progress: float | None = None,
        validate: bool | None = None,
    ) -> dict | None:
        asked = {
            "prompt": prompt,
            "response_ids": response_ids,
            "response_length": response_length,
            "is_truncated": is_truncated,
            "global_steps": global_steps,
            "training_progress": training_progress,
            "validate": validate,
        }
        if judge := os.environ.get("REWARD_JUDGE"):  # see `away.py`
            await chat_complete(judge, solution_str)
        value = number(solution_str)
        score: float | None = (value % 100) / 100
        outcome = "scored"
        if value % 7 == 0:
            score, outcome = None, "unscored"
        elif value % 7 == 1:
            score, outcome = None, "failed"
        split = extra_info["split"]
        _log(output=solution_str, gts=ground_truth, score=score, outcome=outcome, split=split, asked=asked)
        if outcome == "failed":
            raise ValueError(f"no score for {value}")
        if score is None:
            return None
        return {"score": score, f"key_{value % 3}": value % 10, "text": "seen"}

    def post_process_scores(self, scores: list[float]) -> list[float]:
        return halve_all_but_the_best(scores)


def flaky(solution_str: str, ground_truth: str, extra_info: dict, factor: float) -> dict[str, float]:
    """Fails at the first attempt for each response, and always for some. Logs its times and its process."""
    value = number(solution_str)
    began = time.monotonic()
    time.sleep(0.02)
    score = factor * (value % 100) / 100
    times = {"began": began, "ended": time.monotonic()}  # the clock of the machine
    ray = sys.modules.get("ray")
    in_ray = ray is not None and ray.is_initialized()
    _log(output=solution_str, gts=ground_truth, score=score, split=extra_info["split"], in_ray=in_ray, **times)
    if value % 7 == 1:
        raise ValueError(f"no score for {value}")
    if _is_first(f"{extra_info['split']}-{extra_info['index']}-{value}"):
        raise TransientError("try again")
    return {"score": score, "digit": value % 10}


LOST = range(3)
"""The prompts whose judge always fails, for `in_parts`."""


async def in_parts(solution_str: str, ground_truth: str, extra_info: dict) -> dict | None:
    """Scores most responses, with a score for the one turn. Fails on some, leaves some unscored, and gives some scores
    for three turns."""
    value, index, outputs = number(solution_str), extra_info["index"], extra_info.get("outputs", 1)
    score = trained_score(solution_str, index, outputs)
    _log(output=solution_str, gts=ground_truth, score=score, split=extra_info["split"])
    if score is not None:
        return {"score": score, "turn_level_scores": np.array([score])}
    if value % 7 == 2 or does_not_fit(index, outputs):
        return {"score": 50.0, "turn_level_scores": [10.0, 20.0, 20.0]}
    if value % 7 == 0:
        return None
    raise ValueError(f"no score for {value}")


def does_not_fit(index: int, outputs: int) -> bool:
    """Whether `in_parts` gives scores for three turns to every response of a session with this number of outputs."""
    return index % 5 == 3 and outputs > 1


def trained_score(solution_str: str, index: int, outputs: int) -> float | None:
    """What a response that `in_parts` judges is trained with; None if it is masked."""
    value = number(solution_str)
    masked = index in LOST or value % 7 <= 2 or does_not_fit(index, outputs)
    return None if masked else (value % 100) / 100


class Slow(Mixed):
    """As :class:`Mixed`, after up to a second; the first response to the first prompt of training only after the
    trainer has begun with other groups."""

    async def compute_score(self, solution_str: str, ground_truth: str, extra_info: dict) -> dict | None:
        if extra_info["split"] == "train" and extra_info["index"] == 0 and _is_first("held"):
            async with asyncio.timeout(280):
                while True:
                    if _beside_the_log("trained").exists():
                        break
                    await asyncio.sleep(0.1)
        await asyncio.sleep(number(solution_str) % 11 / 10)
        return await super().compute_score(solution_str, ground_truth, extra_info)

    def post_process_scores(self, scores: list[float]) -> list[float]:
        _beside_the_log("trained").touch()
        return super().post_process_scores(scores)


def _beside_the_log(name: str) -> Path:
    return Path(os.environ["REWARD_LOG"]).with_name(name)


def _is_first(name: str) -> bool:
    try:
        _beside_the_log(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


JUDGE_TOKENS = 4
"""The length of the replies of the served model, for `Held`."""


class Held:
    """As :class:`Mixed`, without the comparison of the group, but the rollouts of the first two batches of 32 are held
    up, with 16 judged at a time and room for 24 in the queue: 24 until the queue is full, 16 more until all have been
    generated, and the others until a training step is over. When three steps are over, the served model is asked for
    each rollout. The last batch takes some seconds, so that it is being judged when the run ends. What the queue said
    when it was full is in the file ``queue.json``."""

    def __init__(self) -> None:
        self._mixed = Mixed()
        self._seen = 0
        self._events: dict[int, asyncio.Task[None]] = {}

    async def compute_score(
        self, solution_str: str, ground_truth: str, extra_info: dict, reward_router_address: str | None
    ) -> dict | None:
        await self._hold()
        if _is_over(3) and reward_router_address:
            await chat_complete(reward_router_address, f"Judge: {solution_str}", max_tokens=JUDGE_TOKENS)
        return await self._mixed.compute_score(solution_str, ground_truth, extra_info)

    async def _hold(self) -> None:
        self._seen += 1
        events = {24: _queue_is_full, 40: _all_are_generated, 64: _step_is_over}
        if last := next((last for last in events if self._seen <= last), None):
            if last not in self._events:
                self._events[last] = asyncio.create_task(_until(events[last]))
            await asyncio.shield(self._events[last])
        elif _is_over(5):
            await asyncio.sleep(5)


def _agent_loop_worker() -> Any:
    import ray  # the command that trains loads this module, too, before it sets Ray's environment

    (name,) = (name for name in ray.util.list_named_actors() if name.startswith("agent_loop_worker_"))
    return ray.get_actor(name)


async def _until(happened: Callable[[dict[str, float]], bool]) -> None:
    worker = _agent_loop_worker()
    async with asyncio.timeout(280):
        while True:
            if happened(await worker.__ray_call__.remote(lambda worker: queue_metrics([worker._queue._counts], 0))):
                break
            await asyncio.sleep(0.1)


def _queue_is_full(figures: dict[str, float]) -> bool:
    full = figures["reward_queue/size"] == figures["reward_queue/capacity"]
    if full:
        _beside_the_log("queue.json").write_text(json.dumps(figures))
    return full


def _all_are_generated(figures: dict[str, float]) -> bool:
    return figures["reward_queue/produced"] == 64


def _step_is_over(_: dict[str, float]) -> bool:
    return _is_over(1)


def _is_over(step: int) -> bool:
    return (_beside_the_log("rollouts") / f"{step}.jsonl").exists()


async def of_a_game(solution_str: str, ground_truth: str, extra_info: dict) -> dict[str, Any]:
    """Judges a game of ``examples/guessing``, after some time; fails for one game in ten."""
    from examples.guessing.reward import compute_score

    await asyncio.sleep(number(solution_str) % 7 / 10)
    result = await compute_score(ground_truth, extra_info)
    result["score"] += number(solution_str) % 97 / 97
    outcome = "failed" if number(solution_str) % 10 == 1 else "scored"
    line = {"score": result["score"], "outcome": outcome, "split": extra_info["split"]}
    _log(output=solution_str, gts=ground_truth, guesses=extra_info["guesses"], **line)
    if outcome == "failed":
        raise ConnectionError("the judge of the environment is gone")
    return result


def plain(solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """A sync function that scores everything."""
    score = (number(solution_str) % 100) / 100
    _log(output=solution_str, gts=ground_truth, score=score, outcome="scored", split=extra_info["split"])
    return score


BATCH = 8
"""The prompts of a step, for `Away`."""


class Away:
    """Scores every response, without shuffling of prompts. When the rollouts of steps 3 and 4 are judged, the judge is
    away for two prompts of eight and for some rollouts of two others, and does not answer for two more. When these have
    all arrived and the step before has a checkpoint, a process is killed: in step 3 the command that trains, in step 4
    the agent loop worker. From then on, the judge answers."""

    KILLED = {3: "killed-trainer", 4: "killed-agent-loop-worker"}  # noqa: RUF012

    def __init__(self) -> None:
        self._arrived = 0
        self._all_have_arrived = asyncio.Event()

    async def compute_score(self, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        step, kind, value = extra_info["index"] // BATCH + 1, extra_info["index"] % 4, number(solution_str)
        line = {"output": solution_str, "gts": ground_truth, "split": extra_info["split"]}
        if step in self.KILLED and not self._is_killed(step):
            self._arrived += 1
            if self._arrived == 4 * BATCH:
                self._all_have_arrived.set()
            if kind == 1:
                _log(**line, score=None, outcome="open")
                await self._kill(step)
            if kind == 0 or (kind == 2 and value % 2):
                _log(**line, score=None, outcome="away")
                raise RuntimeError("the judge is away")
        elif step + 1 in self.KILLED and not self._is_killed(step + 1) and _is_first(f"held-{step}"):
            await self._all_have_arrived.wait()  # so that the checkpoint has rewards of the next step
        score = value % 100 / 100
        _log(**line, score=score, outcome="scored")
        return score

    def _is_killed(self, step: int) -> bool:
        return _beside_the_log(self.KILLED[step]).exists()

    async def _kill(self, step: int) -> None:
        dumped = _beside_the_log("rollouts") / f"{step - 1}.jsonl"  # verl writes it after the checkpoint
        async with asyncio.timeout(280):
            while True:
                if dumped.exists() and dumped.read_text().endswith("\n"):
                    break
                await asyncio.sleep(0.02)
        if _is_first(self.KILLED[step]):
            if step == 3:
                pid = int(_beside_the_log("trainer").read_text())
            else:
                pid = await _agent_loop_worker().__ray_call__.remote(lambda worker: os.getpid())
            os.kill(pid, signal.SIGKILL)
        await asyncio.Event().wait()  # until this process ends, too


def rare(solution_str: str) -> float:
    """Rewards one response in four or so, so that many groups get no reward at all."""
    return float(number(solution_str) % 4 == 0)


def _kill_once(pid: int, marker: str) -> None:
    if _is_first(marker):
        os.kill(pid, signal.SIGKILL)


def processes_with(*words: str) -> list[int]:
    """The processes with all these words in their command lines."""
    return [process.pid for process in _processes(words)]


def _processes(words: Sequence[str]) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if all(word in " ".join(process.info["cmdline"] or []) for word in words)]


def processes_left(*words: str) -> list[psutil.Process]:
    """The processes with all these words in their command lines that do not end within 30 s."""
    _, left = psutil.wait_procs(_processes(words), timeout=30)
    return left


async def judged(
    solution_str: str, ground_truth: str, extra_info: dict, reward_router_address: str, model: str
) -> float:
    """Asks the reward model. At its 20th sample it kills the model server, and at its 30th the reward worker itself;
    from the 160th on it presses Ctrl-C on the trainer, again and again."""
    lines = Path(os.environ["REWARD_LOG"])
    seen = len(lines.read_text().splitlines()) if lines.exists() else 0
    if seen >= 20 and not _beside_the_log("killed-server").exists():  # a list of all processes takes long
        for pid in processes_with("reward_loop.serving.embedded", model):
            _kill_once(pid, "killed-server")
    if seen >= 30:
        _kill_once(os.getpid(), "killed-worker")
    if seen >= 160:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(_beside_the_log("trainer").read_text()), signal.SIGINT)
    score = await classify(reward_router_address, solution_str or " ", timeout=None)
    assert isinstance(score, float)
    _log(output=solution_str, gts=ground_truth, score=score, outcome="scored", split=extra_info["split"])
    return score


async def watched(solution_str: str, ground_truth: str, extra_info: dict, reward_router_address: str) -> float:
    """Asks the reward model, and writes down which of it and the rollout was awake."""
    import ray

    score = await classify(reward_router_address, solution_str or " ", timeout=None)
    assert isinstance(score, float)
    servers = {"rollout": "cpu_rollout_server_0", "reward": "cpu_reward_server_0"}
    awake = [name for name, actor in servers.items() if not await ray.get_actor(actor).is_sleeping.remote()]
    line = {"score": score, "outcome": "scored", "split": extra_info["split"], "awake": awake}
    _log(output=solution_str, gts=ground_truth, **line)
    return score
