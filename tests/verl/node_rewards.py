"""The reward function of runs on two nodes whose processes are killed."""

from __future__ import annotations

import os
import signal

import aiohttp

from benchmarks.node_rewards import OnNode, beside_log, processes

SERVER = "reward_loop.serving.embedded.app"
SERVER_KILLED_AT, WORKER_KILLED_AT = 10, 13
"""The numbers of a reward worker's samples, of 16 in a step, at which it kills."""


class Divided(OnNode):
    """Asks the reward model. On the node ``doomed``, kills the model server, then its own process, once in a run."""

    async def compute_score(
        self, solution_str: str, ground_truth: str, reward_router_address: str, doomed: str
    ) -> dict[str, float]:
        # As functions that were written for verl ask: without a key.
        models = f"http://{reward_router_address}/v1/models"
        async with aiohttp.ClientSession(raise_for_status=True) as session, session.get(models):
            pass
        self.count()
        if self.address == doomed:
            if self.seen == SERVER_KILLED_AT:
                self._kill_once("server", [p.pid for p in processes() if SERVER in (p.info["cmdline"] or [])])
            if self.seen == WORKER_KILLED_AT:
                self._kill_once("worker", [os.getpid()])
        return await self.ask(solution_str, ground_truth, reward_router_address)

    def _kill_once(self, what: str, pids: list[int]) -> None:
        try:
            beside_log(f"killed-{what}").touch(exist_ok=False)
        except FileExistsError:
            return
        self.write("killed", {"what": what, "pids": pids})
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
