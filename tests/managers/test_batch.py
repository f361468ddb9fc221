import asyncio

from reward_loop import RewardSample
from reward_loop.managers import BatchRewardLoopManager


def manager(function, **options):
    return BatchRewardLoopManager({"reward_loop": options}, compute_score=function)


async def test_samples_share_calls():
    sizes = []

    def function(solution_strs):
        sizes.append(len(solution_strs))
        return [len(text) for text in solution_strs]

    made = manager(function, batch={"max_batch_size": 4, "max_wait_ms": 60_000})
    rewards = await asyncio.gather(*(made.run_single(RewardSample("x" * i)) for i in range(8)))
    assert [reward["reward_score"] for reward in rewards] == list(range(8))
    assert sizes == [4, 4]


async def test_validation_has_batches_of_its_own():
    calls = []

    async def function(solution_strs):
        calls.append(solution_strs)
        return [1] * len(solution_strs)

    made = manager(function, batch={"max_batch_size": 2, "max_wait_ms": 60_000})
    samples = [RewardSample(text, validate=text.isupper()) for text in ("a", "B", "c", "D")]
    await asyncio.gather(*map(made.run_single, samples))
    assert sorted(calls) == [["B", "D"], ["a", "c"]]


async def test_one_call_while_another_one_runs():
    """A second batch does not wait for the first to end."""
    gate = asyncio.Event()

    async def function(solution_strs):
        if "slow" in solution_strs:
            await gate.wait()
        return [1] * len(solution_strs)

    made = manager(function, batch={"max_batch_size": 1})
    slow = asyncio.create_task(made.run_single(RewardSample("slow")))
    assert (await made.run_single(RewardSample("fast")))["reward_score"] == 1
    assert not slow.done()
    gate.set()
    assert (await slow)["reward_score"] == 1


async def test_a_cancelled_sample_leaves_its_batch_and_the_last_one_cancels_the_call():
    calls, cancelled = [], asyncio.Event()

    async def function(solution_strs):
        calls.append(solution_strs)
        try:
            await asyncio.sleep(60 if "slow" in solution_strs else 0)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return [1] * len(solution_strs)

    made = manager(function, batch={"max_batch_size": 2, "max_wait_ms": 60_000})

    async def start(text):
        task = asyncio.create_task(made.run_single(RewardSample(text)))
        await asyncio.sleep(0.01)
        return task

    (await start("gone")).cancel()
    slow = [await start("slow"), await start("slow")]
    slow[0].cancel()
    await asyncio.sleep(0.01)
    assert not cancelled.is_set()
    slow[1].cancel()
    async with asyncio.timeout(30):
        await cancelled.wait()
        assert [(await task)["reward_score"] for task in (await start("a"), await start("b"))] == [1, 1]
    assert calls == [["slow", "slow"], ["a", "b"]]
