"""The reward function of a run on two nodes. It writes what it does on each node to files beside ``$REWARD_LOG``."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil

from reward_loop.client import classify

SERVER = "reward_loop.serving.embedded"
LISTED_AT, SERVER_KILLED_AT, WORKER_KILLED_AT = 9, 10, 13
"""The numbers of a reward worker's samples at which it writes down the processes of its node, and kills. In a step, it
gets 8 samples from each of two agent loop workers, so both run at the ninth."""


class Divided:
    """Asks the reward model. On the node ``doomed``, kills the model server, then its own process, once in a run."""

    def __init__(self) -> None:
        import ray  # the command that trains loads this module, too, before it starts Ray

        self._seen = 0
        self._address = ray.util.get_node_ip_address()

    async def compute_score(
        self, solution_str: str, ground_truth: str, reward_router_address: str, doomed: str
    ) -> dict[str, float]:
        self._seen += 1
        if self._seen == LISTED_AT:
            self._write("processes", {"commands": [" ".join(p.info["cmdline"] or []) for p in _processes()]})
        if self._address == doomed:
            if self._seen == SERVER_KILLED_AT:
                self._kill_once("server", [p.pid for p in _processes() if SERVER in (p.info["cmdline"] or [])])
            if self._seen == WORKER_KILLED_AT:
                self._kill_once("worker", [os.getpid()])
        score = await classify(reward_router_address, solution_str or " ", timeout=None)
        self._write("calls", {"output": solution_str, "gts": ground_truth, "score": score})
        return {"score": score}

    def _kill_once(self, what: str, pids: list[int]) -> None:
        folder = Path(os.environ["REWARD_LOG"]).parent
        try:
            (folder / f"killed-{what}").touch(exist_ok=False)
        except FileExistsError:
            return
        self._write("killed", {"what": what, "pids": pids})
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def _write(self, name: str, row: dict) -> None:
        with Path(os.environ["REWARD_LOG"]).with_name(f"{name}.jsonl").open("a") as file:
            file.write(json.dumps({"node": self._address, "pid": os.getpid(), **row}) + "\n")


def _processes() -> list[psutil.Process]:
    """The processes of this node."""
    return list(psutil.process_iter(["cmdline"]))
