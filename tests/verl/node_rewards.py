"""The reward functions of runs on two nodes. They write what they do on each node to files beside ``$REWARD_LOG``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil

from reward_loop.client import classify

SERVER = "reward_loop.serving.embedded"
SAMPLES = 16
"""The number of a reward worker's samples in a step: 8 from each of two agent loop workers."""
LISTED_AT, SERVER_KILLED_AT, WORKER_KILLED_AT = 9, 10, 13
"""The numbers of a reward worker's samples at which it writes down the processes of its node, and kills. At the ninth,
both agent loop workers run."""

WAITING = "all-wait"
"""The file that :class:`Waiting` makes when all samples of the node are running."""


class _OnNode:
    """Asks the reward model."""

    def __init__(self) -> None:
        import ray  # the command that trains loads this module, too, before it starts Ray

        self._seen = 0
        self._address = ray.util.get_node_ip_address()

    def _count(self) -> None:
        self._seen += 1
        if self._seen == LISTED_AT:
            self._write("processes", {"commands": [" ".join(p.info["cmdline"] or []) for p in _processes()]})

    async def _ask(self, solution_str: str, ground_truth: str, reward_router_address: str) -> dict[str, float]:
        score = await classify(reward_router_address, solution_str or " ", timeout=None)
        self._write("calls", {"output": solution_str, "gts": ground_truth, "score": score})
        return {"score": score}

    def _write(self, name: str, row: dict) -> None:
        with _beside_log(f"{name}.jsonl").open("a") as file:
            file.write(json.dumps({"node": self._address, "pid": os.getpid(), **row}) + "\n")


class Divided(_OnNode):
    """Asks the reward model. On the node ``doomed``, kills the model server, then its own process, once in a run."""

    async def compute_score(
        self, solution_str: str, ground_truth: str, reward_router_address: str, doomed: str
    ) -> dict[str, float]:
        self._count()
        if self._address == doomed:
            if self._seen == SERVER_KILLED_AT:
                self._kill_once("server", [p.pid for p in _processes() if SERVER in (p.info["cmdline"] or [])])
            if self._seen == WORKER_KILLED_AT:
                self._kill_once("worker", [os.getpid()])
        return await self._ask(solution_str, ground_truth, reward_router_address)

    def _kill_once(self, what: str, pids: list[int]) -> None:
        try:
            _beside_log(f"killed-{what}").touch(exist_ok=False)
        except FileExistsError:
            return
        self._write("killed", {"what": what, "pids": pids})
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


class Waiting(_OnNode):
    """Asks the reward model. On the node ``doomed``, no sample after the first step ends."""

    async def compute_score(
        self, solution_str: str, ground_truth: str, reward_router_address: str, doomed: str
    ) -> dict[str, float]:
        self._count()
        if self._address == doomed and self._seen > SAMPLES:
            if self._seen == 2 * SAMPLES:
                _beside_log(WAITING).touch()
            await asyncio.Event().wait()
        return await self._ask(solution_str, ground_truth, reward_router_address)


def _beside_log(name: str) -> Path:
    return Path(os.environ["REWARD_LOG"]).with_name(name)


def _processes() -> list[psutil.Process]:
    """The processes of this node."""
    return list(psutil.process_iter(["cmdline"]))
