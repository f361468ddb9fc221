import asyncio
import os
import signal
import threading

import pytest

from reward_loop import BlockingRewardAgent, RewardFunctionError, RewardLoopError, RewardsCancelledError
from tests.agent.judges import naive, numbered, scores


class Held:
    """A sync reward function; sample "0" waits until it is released."""

    def __init__(self):
        self.release = threading.Event()

    def compute_score(self, solution_str):
        if solution_str == "0":
            assert self.release.wait(30)
        return float(solution_str)


def test_mini_batches_while_a_slow_judge_thinks():
    judge = Held()
    with BlockingRewardAgent(naive(judge)) as agent:
        pending = agent.submit(numbered(6), group_size=2)
        batches = pending.mini_batches(groups=1)
        first = [next(batches), next(batches)]
        assert sorted(batch.groups[0].index for batch in first) == [1, 2]
        assert not pending.done()
        second = agent.submit(numbered(2, start=10), groups=[2])
        assert scores(second.result(timeout=30)) == [10, 11]
        judge.release.set()
        assert [batch.groups[0].index for batch in batches] == [0]
        assert scores(pending.result()) == [0, 1, 2, 3, 4, 5]


def test_a_busy_loop_keeps_nobody_waiting_for_what_is_complete():
    busy, release = threading.Event(), threading.Event()
    released = []

    async def judge(solution_str):
        if solution_str == "1":
            busy.set()
            released.append(release.wait(30))  # it blocks the loop, as the start of a large batch does
        return float(solution_str)

    with BlockingRewardAgent(naive(judge)) as agent:
        first = agent.submit(numbered(1))
        assert scores(first.result(timeout=30)) == [0]
        second = agent.submit(numbered(1, start=1))
        assert busy.wait(30)
        assert [len(batch) for batch in first.mini_batches(groups=1)] == [1]
        third = agent.submit(numbered(1, start=2))
        release.set()
        assert scores(second.result(timeout=30) + third.result(timeout=30)) == [1, 2]
    assert released == [True]


def test_a_timeout_leaves_the_batch_alone_and_cancel_ends_it():
    judge = Held()
    with BlockingRewardAgent(naive(judge)) as agent:
        pending, cancelled = agent.submit(numbered(1)), agent.submit(numbered(1))
        for batch in (pending, cancelled):
            with pytest.raises(TimeoutError):
                batch.result(timeout=0)
        cancelled.cancel()
        with pytest.raises(RewardsCancelledError):
            cancelled.result()
        judge.release.set()
        assert scores(pending.result()) == [0]


def test_errors_reach_the_caller():
    def judge(solution_str):
        raise ValueError("boom")

    with BlockingRewardAgent(naive(judge, on_failed="raise")) as agent:
        pending = agent.submit(numbered(2))
        with pytest.raises(RewardFunctionError, match="boom"):
            pending.result(timeout=30)
        with pytest.raises(RewardFunctionError, match="boom"):
            next(pending.mini_batches(1))


def test_an_error_that_nobody_waited_for_is_raised_at_the_end():
    called = threading.Event()

    async def judge(solution_str):
        called.set()
        raise ValueError("boom")

    def submit_and_leave():
        with BlockingRewardAgent(naive(judge, on_failed="raise")) as agent:
            agent.submit(numbered(1))
            assert called.wait(30)
            asyncio.run_coroutine_threadsafe(agent._agent.drain(), agent._agent.loop).result(30)

    with pytest.raises(RewardFunctionError, match="boom"):
        submit_and_leave()


def test_outside_of_its_block():
    agent = BlockingRewardAgent(naive(lambda solution_str: 1))
    with pytest.raises(RewardLoopError, match="enter"):
        agent.submit([])
    with agent:
        pass
    with pytest.raises(RewardLoopError, match="closed"):
        agent.submit([])


def test_what_has_ended_is_read_after_the_block():
    judge = Held()
    with BlockingRewardAgent(naive(judge)) as agent:
        complete, cut = agent.submit(numbered(2, start=1)), agent.submit(numbered(1))
        complete.result(timeout=30)
    judge.release.set()
    assert scores(complete.result()) == [1, 2]
    complete.cancel()
    assert sorted(batch.groups[0].scores for batch in complete.mini_batches(1)) == [[1], [2]]
    for read in (cut.result, lambda: next(cut.mini_batches(1))):
        with pytest.raises(RewardsCancelledError, match="closed before this batch was complete"):
            read()


def test_a_forked_process_cannot_use_the_agent_of_its_parent():
    judge = Held()
    with BlockingRewardAgent(naive(judge)) as agent:
        pending = agent.submit(numbered(1))
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # ends the process if it waits
            try:
                for call in (lambda: agent.submit(numbered(1)), pending.result):
                    with pytest.raises(RewardLoopError, match="belongs to the process that entered it"):
                        call()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        judge.release.set()
        assert scores(pending.result(timeout=30)) == [0]
