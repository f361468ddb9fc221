import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_loop import ConfigError, QueueClosedError, RewardFunctionError, RewardLoopError
from reward_loop.agent import QueuedRewards, RewardQueue, Staleness
from tests.agent.judges import Gate, naive, numbered, scores, within


async def turns(count=20):
    """Let everything that can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_full_queue_makes_the_producer_wait():
    queue = RewardQueue(2)
    await queue.put("a", step=1)
    await queue.put("b", step=1)
    third = asyncio.create_task(queue.put("c", step=2))
    fourth = asyncio.create_task(queue.put("d", step=2))
    await turns()
    assert not third.done()
    assert len(queue) == 2
    assert queue.metrics(2)["reward_queue/waiting_producers"] == 2
    taken = [(await within(queue.get())).sample for _ in range(4)]
    assert taken == ["a", "b", "c", "d"]
    await within(asyncio.gather(third, fourth))
    metrics = queue.metrics(2)
    assert (metrics["reward_queue/put"], metrics["reward_queue/got"]) == (4, 4)
    assert metrics["reward_queue/largest_size"] == 2
    assert metrics["reward_queue/producer_wait_s"] > 0
    queue.start_step()
    metrics = queue.metrics(2)
    assert (metrics["reward_queue/put"], metrics["reward_queue/got"]) == (0, 0)
    assert metrics["reward_queue/largest_size"] == metrics["reward_queue/producer_wait_s"] == 0


async def test_a_producer_that_gives_up_leaves_nothing_behind():
    queue = RewardQueue(1)
    await queue.put("a", step=1)
    given_up = asyncio.create_task(queue.put("b", step=1))
    third = asyncio.create_task(queue.put("c", step=1))
    await turns()
    given_up.cancel()
    await turns()
    assert [(await within(queue.get())).sample for _ in range(2)] == ["a", "c"]
    await within(third)


async def test_waiting_entries_count_towards_staleness():
    queue = RewardQueue(4)
    assert queue.staleness(9) == Staleness(0, 0.0)
    for step in (3, 5, 5):
        await queue.put("x", step=step)
    assert queue.staleness(5) == Staleness(2, 2 / 3)
    metrics = queue.metrics(6)
    assert metrics["reward_queue/staleness_max"] == 3
    assert metrics["reward_queue/size"] == 3
    assert metrics["reward_queue/oldest_s"] >= 0


async def test_close():
    queue = RewardQueue(1)
    await queue.put("a", step=1)
    waiting = asyncio.create_task(queue.put("b", step=1))
    await turns()
    queue.close()
    with pytest.raises(QueueClosedError):
        await within(waiting)
    with pytest.raises(QueueClosedError):
        await queue.put("c", step=1)
    assert [entry.sample async for entry in queue] == ["a"]
    with pytest.raises(QueueClosedError, match="empty"):
        await queue.get()
    assert queue.closed


async def test_closing_ends_whoever_waits_for_entries():
    queue = RewardQueue(1)
    getting = [asyncio.create_task(queue.get()) for _ in range(2)]
    await turns()
    queue.close()
    for task in getting:
        with pytest.raises(QueueClosedError):
            await within(task)


async def test_invalid_capacities_and_members_are_refused():
    with pytest.raises(ConfigError, match="capacity"):
        RewardQueue(0)
    with pytest.raises(ConfigError, match="from 0 to 1 in a group of 2, got 2"):
        await RewardQueue(1).put("x", step=1, group="g", group_size=2, member=2)


async def test_a_member_that_arrives_twice_is_an_error():
    queue = RewardQueue(2)
    async with QueuedRewards(queue, naive(lambda solution_str: 1.0)) as rewards:
        for _ in range(2):
            await queue.put(numbered(1)[0], step=1, group="g", group_size=3)
        with pytest.raises(RewardLoopError, match="group 'g' already has member 0"):
            await within(anext(rewards))


async def put_groups(queue, sizes, step=1):
    samples = iter(numbered(sum(sizes)))
    for group, size in enumerate(sizes):
        for member in range(size):
            await queue.put(next(samples), step=step, group=group, group_size=size, member=member)


async def test_groups_come_out_with_their_rewards_and_backpressure_reaches_the_producer():
    gate = Gate()
    queue = RewardQueue(2)
    async with QueuedRewards(queue, naive(gate), in_flight=3) as rewards:
        producing = asyncio.create_task(put_groups(queue, [2, 2, 2, 2]))
        await within(gate.called(3))
        await turns()
        # Three in judging, two in the queue, and a producer that waits with the sixth.
        assert (rewards.judging, len(queue), producing.done()) == (3, 2, False)
        assert rewards.staleness(4) == Staleness(3, 3.0)
        gate.let(*range(8))
        for _ in range(4):
            group = await within(anext(rewards))
            numbers = [entry.sample.solution_str for entry, _ in group.members]
            assert numbers == [str(2 * group.group), str(2 * group.group + 1)]
            assert [reward["reward_score"] for _, reward in group.members] == [float(n) for n in numbers]
        await within(producing)
        queue.close()
        with pytest.raises(StopAsyncIteration):
            await within(anext(rewards))
        assert gate.most == 3


async def test_complete_groups_that_wait_for_the_trainer_can_be_bounded():
    gate = Gate()
    gate.let(*range(6))
    queue = RewardQueue(6)
    async with QueuedRewards(queue, naive(gate), in_flight=1, max_ready=2) as rewards:
        await put_groups(queue, [1] * 6)
        await within(gate.called(2))
        await turns(100)
        assert (rewards.ready, len(queue), len(gate.calls)) == (2, 4, 2)
        assert rewards.staleness(2) == Staleness(1, 1.0)
        assert rewards.metrics(2)["reward_queue/ready_groups"] == 2
        queue.close()
        assert [group.group async for group in rewards] == list(range(6))


@pytest.mark.parametrize("fails", [False, True])
async def test_scores_of_a_whole_group_are_processed_when_all_members_are_judged(fails):
    class Judge:
        async def compute_score(self, solution_str):
            return None if solution_str == "1" else float(solution_str)

        def post_process_scores(self, scores):
            if fails:
                raise ValueError(f"not these {len(scores)}")
            return [score - max(scores) for score in scores]

    queue = RewardQueue(6)
    manager = naive(Judge, on_failed="raise")
    async with QueuedRewards(queue, manager) as rewards:
        await put_groups(queue, [3, 2])
        if fails:
            with pytest.raises(RewardFunctionError, match=r"sample s\d.*not these 2"):
                await within(anext(rewards))
            return
        groups = {}
        for _ in range(2):
            group = await within(anext(rewards))
            groups[group.group] = [reward for _, reward in group.members]
        assert scores(groups[0]) == [-2, 0, 0]
        assert scores(groups[1]) == [-1, 0]
        assert groups[0][1]["reward_extra_info"]["reward_masked"] is True
        assert rewards.judging == 0


async def test_a_manager_of_groups_is_refused():
    class Manager:
        needs_group = True

        async def run_single(self, data):
            return {"reward_score": 1.0}

    with pytest.raises(ConfigError, match=r"Manager waits for all samples of a group.*submit whole groups"):
        QueuedRewards(RewardQueue(6), Manager())


async def test_an_incomplete_group_at_the_end_is_an_error():
    gate = Gate()
    gate.let(0)
    queue = RewardQueue(6)
    async with QueuedRewards(queue, naive(gate)) as rewards:
        await queue.put(numbered(1)[0], step=1, group="g", group_size=2)
        queue.close()
        with pytest.raises(RewardLoopError, match="1 groups were incomplete"):
            await within(anext(rewards))


async def test_members_of_a_group_are_recorded_together(tmp_path):
    queue = RewardQueue(4)
    manager = naive(lambda solution_str: 1.0, log_dir=str(tmp_path))
    async with QueuedRewards(queue, manager) as rewards:
        await put_groups(queue, [2, 2])
        queue.close()
        assert len([group async for group in rewards]) == 2
    rows = [row for file in tmp_path.rglob("*.jsonl") for row in map(json.loads, file.read_text().splitlines())]
    groups = [row["group"] for row in rows if row.get("kind") == "sample"]
    assert len(groups) == 4
    assert sorted(groups.count(group) for group in set(groups)) == [2, 2]


async def test_samples_without_a_group_are_recorded_under_different_names(tmp_path):
    queue = RewardQueue(1)
    manager = naive(lambda solution_str: 1.0, log_dir=str(tmp_path))
    async with QueuedRewards(queue, manager) as rewards:
        for sample in numbered(8):
            await queue.put(replace(sample, uid=None), step=1)
            await within(anext(rewards))
    rows = [row for file in tmp_path.rglob("*.jsonl") for row in map(json.loads, file.read_text().splitlines())]
    samples = [row for row in rows if row.get("kind") == "sample"]
    assert len(samples) == len({row["uid"] for row in samples}) == len({row["group"] for row in samples}) == 8


async def test_leaving_cancels_what_is_in_judging():
    gate = Gate()
    queue = RewardQueue(6)
    async with QueuedRewards(queue, naive(gate)) as rewards:
        await put_groups(queue, [2])
        await within(gate.called(2))
        assert rewards.judging == 2
    assert sorted(gate.cancelled) == ["0", "1"]


async def test_after_leaving_the_queue_keeps_what_was_not_taken():
    gate = Gate()
    queue = RewardQueue(6)
    async with QueuedRewards(queue, naive(gate), in_flight=1) as rewards:
        await put_groups(queue, [1, 1])
        await within(gate.called(1))
    await queue.put(numbered(1, start=7)[0], step=1)
    await turns()
    assert (gate.calls, rewards.judging) == (["0"], 0)
    assert [queue.get_nowait().sample.solution_str for _ in range(2)] == ["1", "7"]
    assert queue.get_nowait() is None


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_nothing_is_lost_with_any_bounds(data):
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=8))
    capacity = data.draw(st.integers(1, 4))
    in_flight = data.draw(st.integers(1, 4))
    max_ready = data.draw(st.one_of(st.none(), st.integers(1, 2)))

    async def main():
        async def judge(solution_str):
            for _ in range(int(solution_str) % 3):
                await asyncio.sleep(0)
            return float(solution_str)

        queue = RewardQueue(capacity)

        async def produce():
            await put_groups(queue, sizes)
            queue.close()

        async with (
            QueuedRewards(queue, naive(judge), in_flight=in_flight, max_ready=max_ready) as rewards,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(produce())
            return [group async for group in rewards]

    groups = asyncio.run(asyncio.wait_for(main(), 30))
    assert sorted(group.group for group in groups) == list(range(len(sizes)))
    assert sum(len(group.members) for group in groups) == sum(sizes)


async def test_reserved_places_are_kept():
    queue = RewardQueue(3)
    await queue.reserve(2)
    await queue.put("a", step=1)
    waiting = asyncio.create_task(queue.put("c", step=1))
    await turns()
    assert not waiting.done()
    queue.put_reserved("b", step=1)
    await turns()
    assert not waiting.done()
    queue.release()
    await within(waiting)
    assert [(await within(queue.get())).sample for _ in range(3)] == ["a", "b", "c"]
    with pytest.raises(RewardLoopError, match="reserve"):
        queue.put_reserved("d", step=1)


async def test_an_entry_can_be_withdrawn_once():
    queue = RewardQueue(2)
    await queue.reserve(2)
    first, second = (queue.put_reserved("same", step=1, group="g", group_size=2, member=0) for _ in range(2))
    waiting = asyncio.create_task(queue.put("c", step=1))
    queue.withdraw(second)
    await within(waiting)
    assert await within(queue.get()) is first
    with pytest.raises(RewardLoopError, match="not in the queue"):
        queue.withdraw(second)
