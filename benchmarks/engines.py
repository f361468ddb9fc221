"""Engines that sleep: generation, training and judges take their time and do nothing; the agents are at work.

The shape is that of the recipe of verl#2854, scaled down. The same loop trains with the reward agent and with a
stand-in that schedules as the recipe's agent does, both with the same judge latencies and no more than so many calls
at a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from reward_loop import BlockingRewardAgent, NaiveRewardLoopManager, RewardSample
from reward_loop.agent.latency import Latency, parse_latency
from reward_loop.agent.simulation import Workload

RECIPE = Workload()
"""1,024 prompts of 5 responses, 4 mini-batches, judges U(1, 40) s, 256 calls at a time, G = 103 s and T = 100 s."""


def scaled_down(steps: int, faster: float, fewer: int, more_calls: int = 1) -> Workload:
    """Return the recipe's shape, so many times faster, with so many times fewer prompts and calls at a time.

    That leaves how long judging takes beside generation and training. ``more_calls`` at a time shortens judging.
    """
    judge = parse_latency("uniform:1:40")
    return replace(
        RECIPE,
        batch=RECIPE.batch // fewer,
        concurrency=RECIPE.concurrency * more_calls // fewer,
        generation=RECIPE.generation / faster,
        training=RECIPE.training / faster,
        judge=Latency(judge.name, judge.mean / faster, lambda rng: judge.draw(rng) / faster),
        steps=steps,
    )


class Agent(Protocol):
    """What the training loop asks of an agent."""

    def rollouts(self, latencies: list[float]) -> Any:
        """The samples of a batch, which take so long to judge, in the form that generation leaves them in."""

    def submit(self, rollouts: Any) -> Any:
        """Take a batch; return what `mini_batches` takes."""

    def mini_batches(self, batch: Any) -> Iterator[int]:
        """Yield the number of groups of each mini-batch, as soon as it is judged."""


@dataclass(frozen=True)
class Steps:
    """How long steps took."""

    seconds: float
    """A step, on average."""
    floor: float
    """max(G + T, R) of the same steps, R being all judging by the number of calls at a time."""

    @property
    def over_floor(self) -> float:
        """By which share a step is longer than its floor."""
        return self.seconds / self.floor - 1


def train(agent: Agent, load: Workload, progress: Any) -> Steps:
    """Train with both overlaps on.

    The first step, which nothing precedes, and the last, which nothing follows, are left out of the result.
    """
    ends = []
    rollouts = [agent.rollouts(load.draws(step)) for step in range(load.steps)]

    def generate(step: int) -> Any:
        time.sleep(load.generation)
        return agent.submit(rollouts[step])

    batch = generate(0)
    for step in range(load.steps):
        following = generate(step + 1) if step + 1 < load.steps else None
        for groups in agent.mini_batches(batch):
            time.sleep(load.training * groups / load.batch)
        ends.append(time.perf_counter())
        batch = following
        progress()
    counted = range(1, load.steps - 1)
    judging = [sum(load.draws(step)) / load.concurrency for step in counted]
    floor = sum(max(load.gpu_seconds, seconds) for seconds in judging) / len(counted)
    return Steps((ends[-2] - ends[0]) / len(counted), floor)


class Ours(AbstractContextManager["Ours"]):
    """The reward agent, on its loop in a thread, with an async function that sleeps."""

    def __init__(self, load: Workload) -> None:
        async def judge(solution_str: str, extra_info: Any) -> float:
            await asyncio.sleep(extra_info["seconds"])
            return 1.0

        self._load = load
        self._agent = BlockingRewardAgent(NaiveRewardLoopManager(compute_score=judge), concurrency=load.concurrency)

    def __enter__(self) -> Ours:
        self._agent.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._agent.__exit__(*exc)

    def rollouts(self, latencies: list[float]) -> list[RewardSample]:
        return [RewardSample("", "math", "", {"seconds": seconds}) for seconds in latencies]

    def submit(self, rollouts: list[RewardSample]) -> Any:
        return self._agent.submit(rollouts, group_size=self._load.responses)

    def mini_batches(self, batch: Any) -> Iterator[int]:
        return map(len, batch.mini_batches(groups=self._load.batch // self._load.mini_batches))


class LikeTheRecipe(AbstractContextManager["LikeTheRecipe"]):
    """Schedules as the agent of verl#2854 does; written from its description, and less work than the original.

    What it reproduces: sync functions in a pool of as many threads as there may be calls; a thread that takes one
    batch, hands all of it to the pool, and waits for its last sample before it looks for the next batch; when there is
    none it sleeps for 1 s; ``get`` collects complete groups until it has a chunk, and sleeps for 0.1 s whenever there
    is none. Both sleeps are scaled like everything else. What it leaves out, in favour of the peer: decoding, tensors,
    and the calls over Ray.
    """

    def __init__(self, load: Workload, faster: float) -> None:
        self._load = load
        self._look_for_batch_s, self._look_for_group_s = 1.0 / faster, 0.1 / faster
        self._pool = ThreadPoolExecutor(load.concurrency)
        self._batches: SimpleQueue[list[float]] = SimpleQueue()
        self._complete: SimpleQueue[int] = SimpleQueue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._judge, daemon=True)

    def __enter__(self) -> LikeTheRecipe:
        self._thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._ending.set()
        self._pool.shutdown(cancel_futures=True)
        self._thread.join()

    def rollouts(self, latencies: list[float]) -> list[float]:
        return latencies

    def submit(self, rollouts: list[float]) -> Any:
        self._batches.put(rollouts)

    def mini_batches(self, batch: Any) -> Iterator[int]:
        for _ in range(self._load.mini_batches):
            yield self._get(self._load.batch // self._load.mini_batches)

    def _get(self, chunk: int) -> int:
        groups = 0
        while groups < chunk:
            try:
                self._complete.get_nowait()
                groups += 1
            except Empty:
                time.sleep(self._look_for_group_s)
        return groups

    def _judge(self) -> None:
        size = self._load.responses
        while not self._ending.is_set():
            try:
                latencies = self._batches.get_nowait()
            except Empty:
                time.sleep(self._look_for_batch_s)
                continue
            left = [size] * (len(latencies) // size)
            groups = {self._pool.submit(time.sleep, seconds): i // size for i, seconds in enumerate(latencies)}
            for call in as_completed(groups):
                if call.cancelled():
                    return
                left[groups[call]] -= 1
                if not left[groups[call]]:
                    self._complete.put(groups[call])
