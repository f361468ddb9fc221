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
    training, who is not the best of the group gets half. With the directory of the served reward ``model``, it is
    asked first, and things happen: see `_harried`."""

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
        reward_router_address: str | None = None,
        model: str | None = None,
    ) -> dict | None:
        if reward_router_address and model and not validate:
            await _harried(solution_str, reward_router_address, model, global_steps)
        asked = {
            "prompt": prompt,
            "response_ids": response_ids,
            "response_length": response_length,
            "is_truncated": is_truncated,
            "global_steps": global_steps,
            "training_progress": training_progress,
            "validate": validate,
        }
        value = number(solution_str)
        score: float | None = (value % 100) / 100
        outcome = "scored"
        if value % 7 == 0:
            score, outcome = None, "unscored"
        elif value % 7 == 1:
            score, outcome = None, "failed"
        split = extra_info["split"]
        line = {"output": solution_str, "gts": ground_truth, "score": score, "outcome": outcome, "split": split}
        _log(**line, asked=asked, pid=os.getpid())
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


class Slow(Mixed):
    """As :class:`Mixed`, after up to a second and an answer of the judge of `away.py`; the first response to the first
    prompt of training only after the trainer has begun with other groups."""

    async def compute_score(self, solution_str: str, ground_truth: str, extra_info: dict) -> dict | None:
        if extra_info["split"] == "train" and extra_info["index"] == 0 and _is_first("held"):
            await _until_true(_beside_the_log("trained").exists)
        await asyncio.sleep(number(solution_str) % 11 / 10)
        await chat_complete(os.environ["REWARD_JUDGE"], solution_str)
        return await super().compute_score(solution_str, ground_truth, extra_info)

    def post_process_scores(self, scores: list[float]) -> list[float]:
        _beside_the_log("trained").touch()
        return super().post_process_scores(scores)


async def _until_true(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(280):
        while True:
            if condition():
                break
            await asyncio.sleep(0.02)


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
        await _until_true(lambda: dumped.exists() and dumped.read_text().endswith("\n"))
        if _is_first(self.KILLED[step]):
            if step == 3:
                pid = int(_beside_the_log("trainer").read_text())
            else:
                pid = await _agent_loop_worker().__ray_call__.remote(lambda worker: os.getpid())
            os.kill(pid, signal.SIGKILL)
        await asyncio.Event().wait()  # until this process ends, too


GONE = "the judge of the environment is gone"


async def rare(solution_str: str, ground_truth: str, extra_info: dict) -> float | dict:
    """Rewards one response in four or so, so that many groups get no reward at all. Of the games of
    ``examples/guessing``, one in ten fails."""
    score = float(number(solution_str) % 4 == 0)
    if "guesses" not in extra_info:
        return score
    guesses, outcome = extra_info["guesses"], "failed" if number(solution_str) % 10 == 1 else "scored"
    _log(output=solution_str, gts=ground_truth, score=score, outcome=outcome, guesses=guesses)
    if outcome == "failed":
        raise ConnectionError(GONE)
    return {"score": score, "guesses": guesses}


STEPS = (1, 2)
"""The steps before Ctrl-C, for `_harried`."""


async def _harried(solution_str: str, reward_router_address: str, model: str, global_steps: int | None) -> None:
    """Asks the reward model. At the 20th call of the run, its server is killed, and at the 30th this reward worker.
    After `STEPS`, Ctrl-C is pressed on the trainer, again and again, and no call ends: no step more is trained."""
    lines = Path(os.environ["REWARD_LOG"])
    seen = len(lines.read_text().splitlines()) if lines.exists() else 0
    if seen >= 20 and not _beside_the_log("killed-server").exists():  # a list of all processes takes long
        for process in _processes(("reward_loop.serving.embedded", model)):
            _kill_once(process.pid, "killed-server")
    if seen >= 30:
        _kill_once(os.getpid(), "killed-worker")
    if global_steps is not None and global_steps > STEPS[-1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(_beside_the_log("trainer").read_text()), signal.SIGINT)
        await asyncio.Event().wait()
    assert isinstance(await classify(reward_router_address, solution_str or " ", timeout=None), float)


def _kill_once(pid: int, marker: str) -> None:
    if _is_first(marker):
        _beside_the_log(marker).write_text(str(pid))
        os.kill(pid, signal.SIGKILL)


def _processes(words: Sequence[str]) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if all(word in " ".join(process.info["cmdline"] or []) for word in words)]


def processes_left(*words: str) -> list[psutil.Process]:
    """The processes with all these words in their command lines that do not end within 30 s."""
    _, left = psutil.wait_procs(_processes(words), timeout=30)
    return left


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
