"""The reward function of runs on two nodes. It writes what it does on each node to files beside ``$REWARD_LOG``.

:class:`OnOneNode` keeps all agent loop workers on the trainer's node.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import ray

from reward_loop.client import classify
from reward_loop.verl.workers.agent_loop import RewardAgentLoopManager

LISTED_AT = 9
"""The number of a reward worker's sample at which it writes down the processes of its node. At the ninth of 16 samples
of a step, all agent loop workers run."""

WAITING = "all-wait"
"""The file that :class:`Waiting` makes when all samples of the node have arrived and wait."""


class OnNode:
    """Asks the reward model for the score of a response."""

    def __init__(self) -> None:
        self.seen = 0
        self.address = ray.util.get_node_ip_address()

    def count(self) -> None:
        """Count a sample."""
        self.seen += 1
        if self.seen == LISTED_AT:
            self.write("processes", {"commands": [" ".join(p.info["cmdline"] or []) for p in processes()]})

    async def ask(self, solution_str: str, ground_truth: str, reward_router_address: str) -> dict[str, float]:
        """Return the score of a response, and write it down."""
        score = await classify(reward_router_address, solution_str or " ", timeout=None)
        self.write("calls", {"output": solution_str, "gts": ground_truth, "score": score})
        return {"score": score}

    def write(self, name: str, row: dict[str, Any]) -> None:
        """Append a row to the file ``{name}.jsonl``."""
        with beside_log(f"{name}.jsonl").open("a") as file:
            file.write(json.dumps({"node": self.address, "pid": os.getpid(), **row}) + "\n")


class Waiting(OnNode):
    """Asks the reward model. On one node, samples after those of the first step wait without end."""

    async def compute_score(
        self,
        solution_str: str,
        ground_truth: str,
        extra_info: dict[str, Any],
        reward_router_address: str,
        doomed: str,
        first_prompts: int,
        samples: int,
    ) -> dict[str, float]:
        """Return the score of a response.

        Args:
            solution_str, ground_truth, extra_info, reward_router_address: as in every reward function.
            doomed: the address of the node where samples wait.
            first_prompts: the number of prompts of the first step.
            samples: the number of samples that the node gets. With the last one, the file `WAITING` is made.
        """
        self.count()
        if self.address == doomed and extra_info["index"] >= first_prompts:
            if self.seen == samples:
                beside_log(WAITING).touch()
            await asyncio.Event().wait()
        return await self.ask(solution_str, ground_truth, reward_router_address)


class OnOneNode(RewardAgentLoopManager):
    """Starts all agent loop workers on the node of this process."""

    async def _init_agent_loop_workers(self) -> None:
        here = ray.get_runtime_context().get_node_id()
        nodes = [node for node in ray.nodes() if node["NodeID"] == here]
        with mock.patch.object(ray, "nodes", return_value=nodes):
            await super()._init_agent_loop_workers()


def beside_log(name: str) -> Path:
    """Return the path of a file in the folder of ``$REWARD_LOG``."""
    return Path(os.environ["REWARD_LOG"]).with_name(name)


def processes() -> list[psutil.Process]:
    """Return the processes of this node."""
    return list(psutil.process_iter(["cmdline"]))
