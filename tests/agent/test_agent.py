import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_loop import (
    BlockingRewardAgent,
    ConfigError,
    NaiveRewardLoopManager,
    RewardAgent,
    RewardFunctionError,
    RewardLoopError,
    RewardSample,
    RewardsCancelledError,
)
from tests.agent.judges import Gate, naive, numbered, scores
from tests.support.clock import within


async def submit_to(agent):
    agent.submit([])


async def number(solution_str):
    return float(solution_str)


@contextlib.asynccontextmanager
async def blocking(manager):
    with BlockingRewardAgent(manager):
        yield


@pytest.mark.parametrize("owner", [RewardAgent, blocking])
async def test_an_agent_closes_its_manager(owner):
    class Manager(NaiveRewardLoopManager):
        closed = 0

        def close(self):
            super().close()
            self.closed += 1

    manager = Manager(compute_score=number)
    async with owner(manager):
        assert not manager.closed
    assert manager.closed == 1


async def test_the_unmasked_scores_of_a_group_are_found_by_their_indices_in_the_batch():
    async def score(solution_str):
        return None if solution_str == "3" else float(solution_str)

    async with RewardAgent(naive(score)) as agent:
        pending = agent.submit(numbered(5), groups=[2, 3])
        await within(pending)
    first, second = sorted(pending.complete_groups(), key=lambda group: group.index)
    assert (first.unmasked, second.unmasked) == ({0: 0, 1: 1}, {2: 2, 4: 4})
    assert second.scores == [2, 0, 4]


async def test_groups_come_as_they_complete_and_may_be_uneven():
    gate = Gate()
    async with RewardAgent(naive(gate)) as agent:
        pending = agent.submit(numbered(6), groups=[3, 1, 2])
        groups = pending.groups()
        gate.let(0, 1, 3)
        first = await within(anext(groups))
        assert (first.index, first.indices, first.scores) == (1, range(3, 4), [3.0])
        gate.let(4, 5)
        assert (await within(anext(groups))).index == 2
        gate.let(2)
        assert (await within(anext(groups))).scores == [0, 1, 2]
        with pytest.raises(StopAsyncIteration):
            await anext(groups)
        assert [group.index async for group in pending] == [1, 2, 0]


async def test_the_concurrency_bound_holds_and_is_used():
    gate = Gate()
    async with RewardAgent(naive(gate), concurrency=3) as agent:
        pending = agent.submit(numbered(9))
        assert (gate.calls, agent.waiting) == ([], 9)  # `submit` returns before anything is judged
        await within(gate.called(3))
        assert (agent.running, agent.waiting) == (3, 6)
        gate.let(*range(9))
        await within(pending)
        assert gate.most == 3


async def test_groups_whose_members_wait_for_each_other_do_not_block_each_other():
    class Together:
        """Members wait until all of their group are there; the first one ends then, the others when they may."""

        needs_group = True

        def __init__(self):
            self.there, self.may_end = {}, asyncio.Event()
            self.three_of_the_second = asyncio.Event()

        async def run_single(self, data):
            here, all_here = self.there.setdefault(data.group, ([], asyncio.Event()))
            here.append(data.solution_str)
            if len(here) == data.group_size:
                all_here.set()
            if len(self.there) == 2 and len(here) == 3:
                self.three_of_the_second.set()
            await all_here.wait()
            if here[0] != data.solution_str:
                await self.may_end.wait()
            return {"reward_score": 1.0, "reward_extra_info": {}}

    manager = Together()
    async with RewardAgent(manager, concurrency=6) as agent:
        first = agent.submit(numbered(8), group_size=4)
        await within(manager.three_of_the_second.wait())
        # Of the 6 places, three members of the first group have 3, and three of the second the others.
        second = agent.submit(numbered(4, start=8), group_size=4)
        manager.may_end.set()
        await within(first)
        await within(second)


async def test_the_policy_raise_reaches_everyone_who_waits():
    gate = Gate()

    async def judge(solution_str):
        if solution_str == "0":
            await asyncio.sleep(0)  # until the others are at it
            raise ValueError("boom")
        return await gate(solution_str)

    async with RewardAgent(naive(judge, on_failed="raise")) as agent:
        pending = agent.submit(numbered(3), group_size=3)
        waiting = [asyncio.create_task(pending.wait(1)) for _ in range(2)]
        for task in waiting:
            with pytest.raises(RewardFunctionError, match=r"sample s0.*boom"):
                await within(task)
        with pytest.raises(RewardFunctionError):
            await within(pending)
        with pytest.raises(RewardFunctionError):
            [batch async for batch in pending.mini_batches(1)]
        await within(agent.drain())
        assert sorted(gate.cancelled) == ["1", "2"]


async def test_an_error_that_nobody_waited_for_is_raised_at_the_end():
    async def judge(solution_str):
        raise ValueError("boom")

    async def submit_and_leave(error=None):
        async with RewardAgent(naive(judge, on_failed="raise")) as agent:
            agent.submit(numbered(1))
            await within(agent.drain())
            if error:
                raise error

    with pytest.raises(RewardFunctionError, match="boom"):
        await submit_and_leave()
    with pytest.raises(KeyError):
        await submit_and_leave(KeyError())


async def test_a_manager_that_raises_or_is_cancelled_is_an_error():
    class Manager:
        async def run_single(self, data):
            if data.solution_str == "0":
                raise KeyError("x")
            raise asyncio.CancelledError

    async with RewardAgent(Manager()) as agent:
        with pytest.raises(RewardLoopError, match=r"Manager\.run_single raised KeyError"):
            await within(agent.submit(numbered(1)))
        with pytest.raises(RewardLoopError, match="cancelled"):
            await within(agent.submit(numbered(1, start=1)))


async def test_cancel_ends_the_samples_of_that_batch_only():
    gate = Gate()
    async with RewardAgent(naive(gate), concurrency=3) as agent:
        doomed = agent.submit(numbered(5))
        other = agent.submit(numbered(2, start=5))
        await within(gate.called(3))
        waiter = asyncio.create_task(doomed.wait(5))
        await asyncio.sleep(0)
        doomed.cancel()
        with pytest.raises(RewardsCancelledError):
            await within(waiter)
        gate.let(5, 6)
        assert scores(await within(other)) == [5, 6]
        assert gate.calls == ["0", "1", "2", "5", "6"]
        assert sorted(gate.cancelled) == ["0", "1", "2"]
        assert (agent.running, agent.waiting) == (0, 0)


async def test_giving_up_an_await_does_not_give_up_the_batch():
    gate = Gate()
    async with RewardAgent(naive(gate)) as agent:
        pending = agent.submit(numbered(1))
        waiter = asyncio.create_task(pending.wait(1))
        await within(gate.called(1))
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        gate.let(0)
        assert scores(await within(pending)) == [0]


async def test_leaving_the_agent_cancels_what_has_not_ended():
    gate = Gate()
    async with RewardAgent(naive(gate)) as agent:
        pending = agent.submit(numbered(2))
        await within(gate.called(2))
    assert sorted(gate.cancelled) == ["0", "1"]
    with pytest.raises(RewardsCancelledError, match="closed"):
        await pending
    with pytest.raises(RewardLoopError, match="closed"):
        agent.submit(numbered(1))


class Stubborn:
    """A manager whose samples end only when they may, whatever is cancelled."""

    def __init__(self):
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def run_single(self, data):
        self.begun.set()
        while not self.may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.may_end.wait()
        return {"reward_score": 1.0, "reward_extra_info": {}}


async def test_leaving_does_not_wait_indefinitely_for_code_that_suppresses_its_cancellation(monkeypatch, caplog):
    monkeypatch.setattr("reward_loop.agent.agent.CLOSING_SECONDS", 0.05)
    manager = Stubborn()
    try:
        async with asyncio.timeout(30), RewardAgent(manager) as agent:
            agent.submit(numbered(1))
            await manager.begun.wait()
    finally:
        manager.may_end.set()  # or the event loop would wait for it
    assert "1 reward tasks still run after their cancellation" in caplog.text


async def test_invalid_group_sizes_are_refused():
    async with RewardAgent(naive(number)) as agent:
        for options in ({"group_size": 2}, {"group_size": 0}, {"groups": [1, 1]}, {"groups": [3, 0]}):
            with pytest.raises(ConfigError, match="groups"):
                agent.submit(numbered(3), **options)
        with pytest.raises(ConfigError, match="exclude each other"):
            agent.submit(numbered(2), group_size=1, groups=[2])
        with pytest.raises(ConfigError, match="at least one"):
            await anext(agent.submit(numbered(1)).mini_batches(0))
        assert await within(agent.submit([])) == []
    with pytest.raises(RewardLoopError, match="enter"):
        RewardAgent(naive(number)).submit([])
    async with RewardAgent(naive(number)) as agent:
        with pytest.raises(RewardLoopError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(submit_to(agent)))
    with pytest.raises(ConfigError, match="run_single"):
        RewardAgent(number)
    with pytest.raises(ConfigError, match="concurrency"):
        RewardAgent(naive(number), concurrency=0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_groups_in_any_order_every_sample_ends_once(data):
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=8))
    count = sum(sizes)
    order = data.draw(st.permutations(range(count)))
    wanted = data.draw(st.integers(1, 4))
    concurrency = data.draw(st.one_of(st.none(), st.integers(1, 6)))

    async def main():
        gate = Gate()
        async with RewardAgent(naive(gate), concurrency=concurrency) as agent:
            pending = agent.submit(numbered(count), groups=sizes)
            taking = asyncio.create_task(collect(pending))
            for i in order:
                gate.let(i)
                await asyncio.sleep(0)
            assert scores(await within(pending)) == list(range(count))
            return await within(taking), gate.calls

    async def collect(pending):
        return [batch async for batch in pending.mini_batches(wanted)]

    batches, calls = asyncio.run(main())
    groups = [group for batch in batches for group in batch]
    assert sorted(group.index for group in groups) == list(range(len(sizes)))
    assert sorted(calls, key=int) == [str(i) for i in range(count)]
    for group in groups:
        assert len(group.indices) == sizes[group.index]
        assert group.scores == [float(i) for i in group.indices]
    assert all(len(batch) == wanted for batch in batches[:-1])


class Judge:
    """Takes the mean off each group's scores; returns too few of them for a score of 99."""

    async def compute_score(self, solution_str):
        return None if solution_str == "none" else float(solution_str)

    def post_process_scores(self, scores):
        if 99.0 in scores:
            return scores[1:]
        mean = sum(scores) / len(scores)
        return [score - mean for score in scores]


def texts(*solutions):
    return [RewardSample(text, uid=f"u{i}") for i, text in enumerate(solutions)]


async def test_scored_samples_that_wait_for_their_group_are_not_in_flight():
    """A group may be larger than the concurrency."""
    judge, flying = Judge(), []

    async def compute_score(solution_str):
        flying.append(solution_str)
        await asyncio.sleep(0)
        assert len(flying) == 1
        flying.pop()
        return float(solution_str)

    judge.compute_score = compute_score
    async with RewardAgent(naive(judge), concurrency=1) as agent:
        assert scores(await within(agent.submit(texts("1", "2", "3", "4"), group_size=4))) == [-1.5, -0.5, 0.5, 1.5]


@pytest.mark.parametrize("size", [None, 9], ids=["", "another size"])
async def test_groups_of_one_name_are_apart_and_have_the_sizes_that_were_submitted(size):
    """A name such as the index of the prompt returns in the next batch, whose samples are scored at the same time."""
    judge, gate = Judge(), asyncio.Event()

    async def compute_score(solution_str):
        if solution_str == "3":
            await gate.wait()
        return float(solution_str)

    judge.compute_score = compute_score
    many = [RewardSample(text, group="q", group_size=size) for text in ("1", "3", "10", "30", "100", "300")]
    async with RewardAgent(naive(judge)) as agent:
        first, second = agent.submit(many[:4], group_size=2), agent.submit(many[4:], group_size=2)
        assert scores(await within(second)) == [-100, 100]
        gate.set()
        assert scores(await within(first)) == [-1, 1, -10, 10]


async def test_the_size_of_a_group_that_a_row_of_verl_names_is_not_that_of_a_single_sample():
    class Manager:
        needs_group = True

        async def run_single(self, row):
            seen.append({name: column[-1] for name, column in row.non_tensor_batch.items()})
            return {"reward_score": 1.0, "reward_extra_info": {}}

    seen = []
    async with RewardAgent(Manager()) as agent:
        await within(agent.submit([SimpleNamespace(non_tensor_batch={"uid": ["q"]})]))
        await within(agent.submit([SimpleNamespace(non_tensor_batch={})]))
        await within(agent.submit([SimpleNamespace(non_tensor_batch={"uid": ["q"]})] * 2, group_size=2))
    assert [row.get("group_size") for row in seen] == [None, 1, 2, 2]


async def test_a_wrong_answer_of_post_processing_fails_the_scored_members():
    async with RewardAgent(naive(Judge())) as agent:
        rewards = await within(agent.submit(texts("1", "none", "99", "4", "6"), groups=[3, 2]))
    outcomes = [r["reward_extra_info"]["reward_outcome"] for r in rewards]
    assert outcomes == ["failed", "unscored", "failed", "scored", "scored"]
    assert "must return a list of 2 scores" in rewards[0]["reward_extra_info"]["reward_error"]
    assert "u0" in rewards[0]["reward_extra_info"]["reward_error"]
    assert rewards[2]["reward_extra_info"]["reward_masked"]
    assert scores(rewards)[3:] == [-1, 1]
