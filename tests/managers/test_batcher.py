import asyncio

import pytest

from reward_loop import Outcome, RewardResult, RewardSample
from reward_loop.managers.groups import Batcher


class Scorer:
    """Counts its calls; a gate holds them up."""

    def __init__(self):
        self.calls = []
        self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, samples):
        self.calls.append([sample.solution_str for sample in samples])
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [RewardResult(Outcome.SCORED, float(sample.solution_str)) for sample in samples]


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def start(batcher, number, key=None, size=2, wait=1000.0):
    return asyncio.create_task(batcher.score(RewardSample(str(number)), key, size, wait))


async def test_a_cancelled_sample_leaves_its_batch():
    scorer = Scorer()
    batcher = Batcher(scorer)
    first = start(batcher, 1)
    await settle()
    first.cancel()
    await settle()
    assert batcher._open == {}
    results = await asyncio.gather(start(batcher, 2), start(batcher, 3))
    assert [result.score for result in results] == [2, 3]
    assert scorer.calls == [["2", "3"]]


async def test_a_call_is_cancelled_with_the_last_who_waits_for_it():
    scorer = Scorer()
    scorer.gate.clear()
    batcher = Batcher(scorer)
    tasks = [start(batcher, i) for i in range(2)]
    await settle()
    tasks[0].cancel()
    await settle()
    assert scorer.cancelled == 0
    tasks[1].cancel()
    await settle()
    assert scorer.cancelled == 1
    assert all(task.cancelled() for task in tasks)


@pytest.mark.parametrize("given", [1, 3])
async def test_another_number_of_results_is_an_error_of_all(given):
    async def broken(samples):
        return [RewardResult(Outcome.SCORED, 1.0)] * given

    batcher = Batcher(broken)
    tasks = [start(batcher, i) for i in range(2)]
    async with asyncio.timeout(60):
        for task in tasks:
            with pytest.raises(ValueError, match="argument"):
                await task


def test_the_batcher_works_in_a_second_event_loop():
    scorer = Scorer()
    batcher = Batcher(scorer)

    async def leave_one_waiting():
        start(batcher, 1)
        await settle()

    async def go_on():
        return await asyncio.gather(start(batcher, 2), start(batcher, 3))

    asyncio.run(leave_one_waiting())
    assert [result.score for result in asyncio.run(go_on())] == [2, 3]
