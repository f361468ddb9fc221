import asyncio
from collections import Counter

import pytest

from reward_loop import ConfigError
from reward_loop.agent import QueueCounts, RewardQueue, queue_metrics
from tests.support.clock import settle, within


class Producer:
    """Reserves places for a group, waits for `generated`, and judges each rollout until `judged`."""

    def __init__(self, queue, count=1, step=1):
        self.queue, self.count, self.step = queue, count, step
        self.generated, self.judged = asyncio.Event(), asyncio.Event()
        self.has_places, self.judging = False, 0
        self.task = asyncio.create_task(self.run())

    async def run(self):
        async with self.queue.reserve(self.count) as places:
            self.has_places = True
            await self.generated.wait()
            await asyncio.gather(*(self.judge(places) for _ in range(self.count)))

    async def judge(self, places):
        async with places.judging(step=self.step):
            self.judging += 1
            await self.judged.wait()


async def finish(*producers):
    for one in producers:
        one.generated.set()
        one.judged.set()
    await within(asyncio.gather(*(one.task for one in producers)))


async def test_a_full_queue_pauses_generation_and_nothing_is_dropped():
    queue = RewardQueue(capacity=2)
    first, second, third = (Producer(queue, 2), Producer(queue), Producer(queue))
    await settle()
    assert [one.has_places for one in (first, second, third)] == [True, False, False]
    first.generated.set()
    await settle()
    # Its rollouts are being judged: there is room for two others.
    assert [one.has_places for one in (first, second, third)] == [True, True, True]
    await finish(first, second, third)
    metrics = queue.metrics(current_step=1)
    assert [metrics[f"reward_queue/{name}"] for name in ("produced", "consumed", "dropped", "size")] == [4, 4, 0, 0]
    assert metrics["reward_queue/wait_s"] > 0
    assert queue.metrics(1)["reward_queue/produced"] == 0


async def test_the_oldest_rollouts_are_judged_first_and_a_number_at_a_time():
    queue = RewardQueue(capacity=10, in_flight=2)
    producers = [Producer(queue, step=step) for step in range(4)]
    for one in producers:
        one.generated.set()
    await settle()
    assert [one.judging for one in producers] == [1, 1, 0, 0]
    metrics = queue.metrics(current_step=5)
    figures = [metrics[f"reward_queue/{name}"] for name in ("size", "size_max", "in_flight", "capacity")]
    assert figures == [2, 2, 2, 10]
    assert (metrics["reward_queue/staleness_max"], metrics["reward_queue/staleness_mean"]) == (5, 3.5)
    producers[1].judged.set()
    await settle()
    assert [one.judging for one in producers] == [1, 1, 1, 0]
    await finish(*producers)


async def test_a_request_for_more_than_the_capacity_waits_for_an_empty_queue():
    queue = RewardQueue(capacity=2, in_flight=1)
    small, large, behind = Producer(queue), Producer(queue, 5), Producer(queue)
    await settle()
    assert (large.has_places, behind.has_places) == (False, False)
    await finish(small, large, behind)
    assert large.judging == 5


@pytest.mark.parametrize("state", ["reserving", "generating", "waiting", "judging"])
async def test_a_cancelled_producer_frees_its_places(state):
    queue = RewardQueue(capacity=1, in_flight=1)
    before = Producer(queue)
    if state != "reserving":
        before.generated.set()
        await settle()
    if state in ("generating", "judging"):
        before.judged.set()
        await before.task
        before = None
    cancelled = Producer(queue)
    if state in ("waiting", "judging"):
        cancelled.generated.set()
    await settle()
    cancelled.task.cancel()
    await settle()
    if before is not None:
        await finish(before)
    await finish(Producer(queue))
    metrics = queue.metrics(1)
    assert (metrics["reward_queue/size"], metrics["reward_queue/in_flight"]) == (0, 0)


def test_queues_of_several_processes_have_common_metrics():
    metrics = queue_metrics(
        [
            QueueCounts(8, 3, 2, 3, 1.5, [1.0, 2.0], queued=Counter([4]), judged=Counter([3])),
            QueueCounts(8, produced=1, compute_s=[float(i) for i in range(3, 101)], queued=Counter([5])),
        ],
        current_step=5,
        updates_per_step=2,
    )
    assert metrics == {
        "reward_queue/capacity": 16,
        "reward_queue/size": 2,
        "reward_queue/size_max": 3,
        "reward_queue/in_flight": 1,
        "reward_queue/produced": 4,
        "reward_queue/consumed": 2,
        "reward_queue/dropped": 0,
        "reward_queue/wait_s": 1.5,
        "reward_queue/staleness_max": 4,
        "reward_queue/staleness_mean": 2,
        "reward_compute/mean_s": 50.5,
        "reward_compute/max_s": 100,
        "reward_compute/p95_s": 95,
    }


@pytest.mark.parametrize("bounds", [{"capacity": 0}, {"capacity": 1, "in_flight": 0}])
def test_a_bound_below_one_is_refused(bounds):
    with pytest.raises(ConfigError, match="at least 1"):
        RewardQueue(**bounds)
