"""Simulated training: generation, training and judges only sleep; the agents and their scheduling are real.

The workload is that of the recipe in verl#2854, scaled down. The same training loop runs with the reward agent and with
a stand-in that schedules like the recipe's agent. Both have the same judge latencies and the same concurrency limit.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from reward_loop import BlockingRewardAgent, NaiveRewardLoopManager, RewardSample
from reward_loop.agent.filter_forecast import FilterForecast


@dataclass(frozen=True, slots=True)
class Workload:
    """The parts of a training step. Times are in seconds."""

    batch: int = 1024
    """Prompts per step; each is a group."""
    responses: int = 5
    """Responses per prompt."""
    judge: tuple[float, float] = (1.0, 40.0)
    """The shortest and the longest judging time of one response."""
    concurrency: int = 256
    """The number of responses that are judged at a time."""
    generation: float = 103.0
    training: float = 100.0
    """All updates of a step together."""
    mini_batches: int = 4
    steps: int = 100

    @property
    def samples(self) -> int:
        """Samples per step."""
        return self.batch * self.responses

    @property
    def gpu_seconds(self) -> float:
        """The step time if judging took no time."""
        return self.generation + self.training

    def draws(self, step: int) -> list[float]:
        """Return the judging times of a step; they are the same in every mode and every run."""
        rng = random.Random(f"0:{step}")
        return [rng.uniform(*self.judge) for _ in range(self.samples)]


RECIPE = Workload()
"""1,024 prompts with 5 responses each, 4 mini-batches, judge latency uniform in 1 to 40 s, 256 concurrent calls,
G = 103 s and T = 100 s."""


def scaled_down(steps: int, faster: float, fewer: int, more_calls: int = 1) -> Workload:
    """Return the recipe's workload, scaled down.

    The ratio of judging time to generation and training time stays the same, except for ``more_calls``.

    Args:
        steps: number of training steps.
        faster: divides all times.
        fewer: divides the number of prompts and the concurrency.
        more_calls: multiplies the concurrency, which shortens judging.
    """
    low, high = RECIPE.judge
    return replace(
        RECIPE,
        batch=RECIPE.batch // fewer,
        concurrency=RECIPE.concurrency * more_calls // fewer,
        generation=RECIPE.generation / faster,
        training=RECIPE.training / faster,
        judge=(low / faster, high / faster),
        steps=steps,
    )


class Agent(Protocol):
    """The interface between the training loop and an agent."""

    def rollouts(self, latencies: list[float]) -> Any:
        """Return the samples of a batch; ``latencies`` are their judging times in seconds."""

    def submit(self, rollouts: Any) -> Any:
        """Submit a batch, and return the handle for `mini_batches`."""

    def mini_batches(self, batch: Any) -> Iterator[int]:
        """Yield the number of groups of each mini-batch, as soon as the mini-batch is judged."""


@dataclass(frozen=True)
class Steps:
    """The measured length of steps."""

    seconds: float
    """Mean length of a step, in seconds."""
    floor: float
    """Mean of max(G + T, R) over the same steps, in seconds. R is the total judging time divided by the concurrency."""

    @property
    def over_floor(self) -> float:
        """Relative excess of the mean step length over the floor."""
        return self.seconds / self.floor - 1


def train(agent: Agent, load: Workload, progress: Any) -> Steps:
    """Train with both overlaps: mini-batch pipeline and one-step off-policy.

    The result excludes the first and the last step, because they overlap with fewer steps than the others.
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


PARTS = 16
"""How many parts of a batch are generated one after the other, and judged as soon as they are generated."""
POLL_S = 0.005
SETTLING = 2
"""Number of steps at the start of a run with a filter that are not counted: the share that it removes is not known."""


def train_filtered(agent: Ours, load: Workload, share: float, progress: Any, *, ahead: float) -> Steps:
    """Train as the mode ``reward_pipeline`` with both overlaps, with a filter that removes a share of the groups.

    Args:
        share: the probability that the filter removes a group.
        ahead: ``max_ahead`` of the mode; with 0, the engine waits until the groups of a step are judged, and then
            generates as many prompts as were filtered.

    The floor is that of all prompts that were trained on or filtered.
    """
    rollout = _FilteredRollout(agent, load, share)
    forecast = FilterForecast(round(ahead * load.batch))
    consumed, ends = [], []

    def missing(later: int = 0) -> int:
        kept, filtered = rollout.look()
        forecast.count(kept=kept, filtered=filtered)
        left = rollout.submitted
        judged = sum(prompt in rollout.judged for prompt in left)
        if not ahead:
            return max(0, load.batch + later - len(left))
        return forecast.missing(load.batch, kept=judged, pending=len(left) - judged, later=later)

    rollout.generate(load.batch)
    for step in range(load.steps):
        following = load.batch if step + 1 < load.steps else 0
        needed = missing(following)
        while needed or not rollout.judged.issuperset(rollout.submitted[: load.batch]):
            rollout.generate(needed)
            time.sleep(POLL_S)
            if ahead:
                needed = missing()
            else:
                rollout.wait(load.batch)
                needed = missing(following)
        rollout.submitted = rollout.submitted[load.batch :]
        time.sleep(load.training)
        forecast.end_step()
        ends.append(time.perf_counter())
        consumed.append(load.batch * (step + 1) + rollout.filtered)
        progress()
    counted = len(ends) - SETTLING - 1
    prompts = (consumed[-2] - consumed[SETTLING - 1]) / counted / load.batch
    judging = prompts * load.samples * statistics.mean(load.judge) / load.concurrency
    return Steps((ends[-2] - ends[SETTLING - 1]) / counted, max(prompts * load.generation + load.training, judging))


class _FilteredRollout:
    """Prompts that are generated and judged, and the filter."""

    def __init__(self, agent: Ours, load: Workload, share: float) -> None:
        self.submitted: list[int] = []
        """The prompts that are not trained on or filtered, oldest first."""
        self.judged: set[int] = set()
        self.filtered = 0
        """How many prompts were filtered."""
        self._agent, self._load, self._share = agent, load, share
        self._random = random.Random(0)
        self._count = 0
        self._batches: list[tuple[int, Any, int]] = []
        """The first prompt of each submitted part, its rewards, and how many of them have been looked at."""

    def generate(self, count: int) -> None:
        end = time.perf_counter()
        while count > 0:
            part = min(count, self._load.batch // PARTS)
            end += self._load.generation * part / self._load.batch
            time.sleep(max(0.0, end - time.perf_counter()))  # the engine does not wait for the submission
            latencies = [self._random.uniform(*self._load.judge) for _ in range(part * self._load.responses)]
            self._batches.append((self._count, self._agent.submit(self._agent.rollouts(latencies)), 0))
            self.submitted += range(self._count, self._count + part)
            self._count += part
            count -= part

    def look(self) -> tuple[int, int]:
        """Filter the groups that were judged since the last call. Returns how many are kept, and how many are not."""
        new: set[int] = set()
        for number, (first, rewards, seen) in enumerate(self._batches):
            groups = rewards.complete_groups(seen)
            new |= {first + group.index for group in groups}
            self._batches[number] = (first, rewards, seen + len(groups))
        self._batches = [batch for batch in self._batches if batch[2] < batch[1].group_count]
        filtered = {prompt for prompt in new if random.Random(prompt).random() < self._share}
        self.judged |= new
        self.submitted = [prompt for prompt in self.submitted if prompt not in filtered]
        self.filtered += len(filtered)
        return len(new) - len(filtered), len(filtered)

    def wait(self, count: int) -> None:
        """Wait until the oldest ``count`` prompts are judged."""
        oldest = self.submitted[:count]
        for first, rewards, _ in self._batches:
            if first <= oldest[-1]:
                rewards.result()


class Ours(AbstractContextManager["Ours"]):
    """The reward agent, on an event loop in a thread, with an async function that sleeps."""

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
    """Schedules like the agent of verl#2854; implemented from its description.

    Reproduced:

    - Sync functions run in a thread pool with one thread per concurrent call.
    - A thread takes one batch, submits all its samples to the pool, and waits for the last sample before it takes the
      next batch. If there is no batch, it sleeps for 1 s.
    - ``get`` collects complete groups until a chunk is complete, and sleeps for 0.1 s if there is no group.

    Both sleeps are scaled like all other times. Omitted, in favor of this stand-in: decoding, tensors and Ray calls.
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
