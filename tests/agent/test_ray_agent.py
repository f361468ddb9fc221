import asyncio
import os
import pickle
import signal
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ray")

from reward_loop import ConfigError, RewardFunctionError, RewardLoopError, RewardSample
from reward_loop._util.garbage_collector import THRESHOLD
from reward_loop.agent.journal import Journal
from reward_loop.agent.pending import PendingRewards
from reward_loop.agent.ray_agent import MAX_STARTS, AsyncRewardAgent, _DurableAgent
from tests.agent.judges import Gate, numbered
from tests.local_ray import local_ray


async def within(awaitable, seconds=30):
    return await asyncio.wait_for(awaitable, seconds)


async def test_chunks_of_groups_in_order_of_completion():
    gate = Gate()
    agent = AsyncRewardAgent(gate)
    assert await agent.compute_reward_pipeline(numbered(6), group_size=2) == 6
    gate.let(4, 5)
    indices, rewards, infos = await within(agent.get(2))
    assert (indices, rewards, infos["acc"]) == ([4, 5], [4, 5], [4, 5])
    gate.let(0, 1, 2, 3)
    assert (await within(agent.get(4)))[0] == [0, 1, 2, 3]
    with pytest.raises(RewardLoopError, match="nothing to get"):
        await agent.get(2)


async def test_get_builds_only_the_groups_that_it_hands_out(monkeypatch):
    built = []
    group = PendingRewards._group
    monkeypatch.setattr(PendingRewards, "_group", lambda self, index: built.append(index) or group(self, index))
    agent = AsyncRewardAgent(lambda solution_str: 1.0)
    await agent.compute_reward_pipeline(numbered(20), group_size=2)
    for _ in range(10):
        await within(agent.get(2))
    assert sorted(built) == list(range(10))


async def test_a_batch_can_be_submitted_while_another_is_in_flight():
    gate = Gate()
    agent = AsyncRewardAgent(gate)
    await agent.compute_reward_pipeline(numbered(2), group_size=2)
    await agent.compute_reward_pipeline(numbered(2, start=2), group_size=2)
    await within(gate.called(4))
    gate.let(*range(4))
    assert [(await within(agent.get(2)))[1] for _ in range(2)] == [[0, 1], [2, 3]]


async def test_a_get_that_is_given_up_takes_nothing():
    gate = Gate()
    agent = AsyncRewardAgent(gate)
    await agent.compute_reward_pipeline(numbered(2))
    gate.let(0)
    given_up = asyncio.create_task(agent.get(2))
    await within(gate.called(2))
    given_up.cancel()
    gate.let(1)
    assert (await within(agent.get(2)))[0] == [0, 1]


async def test_the_last_chunk_may_be_smaller_and_a_hook_gets_it():
    gate = Gate()
    gate.let(*range(3))
    agent = AsyncRewardAgent(gate)
    await agent.compute_reward_pipeline(numbered(3))

    def hook(indices, rewards, infos, scale):
        return len(indices), [reward * scale for reward in rewards], sorted(infos)[0]

    assert (await within(agent.get(2, hook_func=hook, scale=2)))[0] == 2
    assert (await within(agent.get(2, hook_func=hook, scale=2)))[0] == 1


async def test_samples_with_the_same_uid_make_a_group():
    agent = AsyncRewardAgent(lambda solution_str: float(solution_str))
    samples = [RewardSample(str(i), uid=uid) for i, uid in enumerate("abab")]
    await agent.compute_reward_pipeline(samples, group_size=2)
    chunks = [(await within(agent.get(2)))[0] for _ in range(2)]
    assert sorted(chunks) == [[0, 2], [1, 3]]
    with pytest.raises(ConfigError, match="3 have uid 'a'"):
        await agent.compute_reward_pipeline([RewardSample("", uid=uid) for uid in "aaab"], group_size=2)


async def test_invalid_sizes_and_calls_are_refused():
    agent = AsyncRewardAgent(lambda solution_str: 1, config={"on_failed": "raise"})
    with pytest.raises(ConfigError, match="do not divide"):
        await agent.compute_reward_pipeline(numbered(3), group_size=2)
    assert await agent.compute_reward_pipeline([], group_size=2) == 0
    await agent.compute_reward_pipeline(numbered(2), group_size=2)
    with pytest.raises(ConfigError, match="not a multiple"):
        await agent.get(1)
    with pytest.raises(ConfigError, match="unknown option"):
        AsyncRewardAgent(lambda solution_str: 1, config={"timeuot": 1})


async def test_an_error_that_stops_a_batch_leaves_the_next_one_alone():
    def judge(solution_str):
        if solution_str == "0":
            raise ValueError("boom")
        return {"score": 1, "extra": solution_str} if solution_str == "2" else 1

    agent = AsyncRewardAgent(judge, config={"on_failed": "raise"})
    await agent.compute_reward_pipeline(numbered(1))
    await agent.compute_reward_pipeline(numbered(2, start=1))
    with pytest.raises(RewardFunctionError, match="boom"):
        await within(agent.get(1))
    indices, _, infos = await within(agent.get(2))
    assert (indices, infos["extra"]) == ([0, 1], [None, "2"])


async def test_the_rewards_of_a_data_proto_are_a_tensor():
    torch = pytest.importorskip("torch")

    class DataProto:
        def __init__(self, count):
            self.batch = {
                "responses": torch.arange(count)[:, None].repeat(1, 4),
                "attention_mask": torch.tensor([[1] * (2 + 1 + i % 4) + [0] * (3 - i % 4) for i in range(count)]),
            }
            uids = np.array([f"u{i % 2}" for i in range(count)], dtype=object)
            self.non_tensor_batch = {"uid": uids}

        def __len__(self):
            return len(self.batch["responses"])

        def __getitem__(self, rows):
            part = DataProto(0)
            part.batch = {key: value[rows] for key, value in self.batch.items()}
            part.non_tensor_batch = {key: value[rows] for key, value in self.non_tensor_batch.items()}
            return part

    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return str(int(ids[0]) + 1)

    agent = AsyncRewardAgent(lambda solution_str: float(solution_str), tokenizer=Tokenizer())
    assert await agent.compute_reward_pipeline(DataProto(4), group_size=2) == 4
    indices, rewards, infos = await within(agent.get(4))
    assert indices == [0, 1, 2, 3]
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [[1, 0, 0, 0], [0, 2, 0, 0], [0, 0, 3, 0], [0, 0, 0, 4]]
    assert infos["acc"].tolist() == [1, 2, 3, 4]
    assert infos["acc"].dtype == object


async def test_shutdown():
    gate = Gate()
    agent = AsyncRewardAgent(gate)
    await agent.shutdown()
    agent = AsyncRewardAgent(gate)
    await agent.compute_reward_pipeline(numbered(2))
    await within(gate.called(2))
    await agent.shutdown()
    assert sorted(gate.cancelled) == ["0", "1"]


class JournalHandle:
    """A journal as another process has it: it answers later, and shares nothing with the agent."""

    def __init__(self):
        self.journal = Journal()
        self._told = asyncio.Condition()

    def __getattr__(self, name):
        async def remote(*args):
            arguments = pickle.loads(pickle.dumps(args))
            async with self._told:
                self._told.notify_all()
                return pickle.loads(pickle.dumps(getattr(self.journal, name)(*arguments)))

        return type("Method", (), {"remote": staticmethod(remote)})

    async def rewards(self, count):
        """Wait until so many rewards have been noted."""
        async with self._told:
            await self._told.wait_for(lambda: sum(len(e.rewards) for e in self.journal.entries().values()) >= count)


class Durable(AsyncRewardAgent):
    """The actor without Ray: the test says which call is being answered."""

    def __init__(self, judge, copy, **kwargs):
        super().__init__(judge, **kwargs)
        self._copy, self._arguments = copy, ((), {})
        copy.journal._arguments = ((), {})
        self.call = 0

    def _call(self):
        return str(self.call)


async def killed(agent):
    """End an agent as if its process had gone: what it notes from here on reaches nobody."""
    agent._copy = None
    await agent.shutdown()


async def test_a_restarted_agent_judges_what_had_not_ended_and_nothing_else():
    gate, copy = Gate(), JournalHandle()
    agent = Durable(gate, copy)
    await agent.compute_reward_pipeline(numbered(4), group_size=2)
    gate.let(0, 1, 3)
    await within(copy.rewards(3))
    await killed(agent)
    assert gate.cancelled == ["2"]

    agent = Durable(gate, copy)
    agent.call = 1
    assert (await within(agent.get(2)))[1] == [0, 1]
    gate.let(2)
    agent.call = 2
    assert (await within(agent.get(2)))[1] == [2, 3]
    assert sorted(gate.calls) == ["0", "1", "2", "2", "3"]
    await agent.shutdown()


async def test_a_call_that_is_made_again_changes_nothing():
    gate, copy = Gate(), JournalHandle()
    gate.let(*range(4))
    agent = Durable(gate, copy)
    await agent.compute_reward_pipeline(numbered(4), group_size=2)
    agent.call = 1
    answer = await within(agent.get(2))
    await killed(agent)

    agent = Durable(gate, copy)
    assert await agent.compute_reward_pipeline(numbered(4), group_size=2) == 4
    agent.call = 1
    assert await within(agent.get(2)) == answer
    agent.call = 2
    rest = await within(agent.get(2))
    assert sorted(answer[0] + rest[0]) == [0, 1, 2, 3]
    await killed(agent)

    # Also the last answer of a batch, of which nothing is left.
    agent = Durable(gate, copy)
    agent.call = 2
    assert await within(agent.get(2)) == rest
    agent.call = 3
    with pytest.raises(RewardLoopError, match="nothing to get"):
        await agent.get(2)
    assert len(gate.calls) == 4
    await agent.shutdown()


async def test_groups_that_were_handed_out_are_not_post_processed_again():
    class Judge:
        async def compute_score(self, solution_str):
            return float(solution_str)

        def post_process_scores(self, scores):
            return [score + 100 for score in scores]

    copy = JournalHandle()
    agent = Durable(Judge, copy)
    await agent.compute_reward_pipeline(numbered(4), group_size=2)
    agent.call = 1
    first = await within(agent.get(2))
    await within(copy.rewards(4))
    await killed(agent)

    agent = Durable(Judge, copy)
    agent.call = 1
    assert await within(agent.get(2)) == first
    agent.call = 2
    second = await within(agent.get(2))
    assert sorted(first[1] + second[1]) == [100, 101, 102, 103]
    await agent.shutdown()


async def test_a_restarted_journal_receives_all_batches_again():
    gate, copy = Gate(), JournalHandle()
    agent = Durable(gate, copy)
    await agent.compute_reward_pipeline(numbered(2), group_size=1)
    gate.let(0)
    await within(copy.rewards(1))
    copy.journal = Journal()
    gate.let(1)
    await within(copy.rewards(2))
    await killed(agent)

    agent = Durable(gate, copy)
    agent.call = 1
    assert (await within(agent.get(2)))[1] == [0, 1]
    assert gate.calls == ["0", "1"]
    await agent.shutdown()


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_wherever_it_is_killed_every_sample_is_handed_out_once(data):
    async def scenario():
        gate, copy = Gate(), JournalHandle()
        agent, handed, kills = Durable(gate, copy), [], []
        batches, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
        groups = data.draw(st.integers(1, 4))
        count = batches * groups * size
        for batch in range(batches):
            agent.call = f"submit {batch}"
            await agent.compute_reward_pipeline(numbered(groups * size, start=batch * groups * size), size)
        order = data.draw(st.permutations(range(count)))
        call = 0
        for sample in order:
            gate.let(sample)
            for _ in range(data.draw(st.integers(0, 20))):
                await asyncio.sleep(0)
            if data.draw(st.booleans()):
                await killed(agent)
                entries = copy.journal.entries().values()
                in_journal = {str(int(reward["reward_score"])) for e in entries for reward in e.rewards.values()}
                kills.append((len(gate.calls), in_journal))
                agent = Durable(gate, copy)
                await within(agent._start())
        while len(handed) < count:
            agent.call = call = call + 1
            answer = await within(agent.get(size))
            if data.draw(st.booleans()):
                await killed(agent)
                agent = Durable(gate, copy)
                agent.call = call
                assert await within(agent.get(size)) == answer
            handed += answer[1]
        assert sorted(handed) == list(range(count))
        for calls, in_journal in kills:
            assert not in_journal.intersection(gate.calls[calls:])
        await agent.shutdown()

    asyncio.run(scenario())


def test_an_agent_whose_process_keeps_dying_is_not_started_for_ever(monkeypatch):
    journal = Journal()
    journal.replace({}, ((Gate(),), {}))

    class Handle:
        def __getattr__(self, name):
            return type("Method", (), {"remote": staticmethod(getattr(journal, name))})

    monkeypatch.setattr("ray.get_actor", lambda name: Handle())
    monkeypatch.setattr("ray.get", lambda answer: answer)
    for _ in range(MAX_STARTS):
        _DurableAgent("journal")
    with pytest.raises(RewardLoopError, match=r"died 4 times.*no new reward.*crash the interpreter"):
        _DurableAgent("journal")


@pytest.fixture(scope="module")
def cluster():
    import ray

    with local_ray(log_to_driver=False):
        yield ray


@pytest.mark.integration
def test_the_actor(cluster, tmp_path):
    from reward_loop.agent.ray_agent import RayAsyncRewardAgent

    (tmp_path / "reward.py").write_text(
        """
import asyncio
waiting = 0
everyone = asyncio.Event()

async def compute_score(solution_str, count):
    # Ends only when all are in flight at once, in one process.
    global waiting
    waiting += 1
    if waiting == count:
        everyone.set()
    await everyone.wait()
    if solution_str == "7":
        raise ValueError("boom")
    return float(solution_str)
"""
    )
    count = 3_000
    agent = RayAsyncRewardAgent.remote(f"{tmp_path}/reward.py", reward_kwargs={"count": count})
    half = count // 2
    for start in (0, half):
        size = agent.compute_reward_pipeline.remote(numbered(half, start=start), group_size=5)
        assert cluster.get(size, timeout=300) == half
    first = cluster.get(agent.get.remote(half), timeout=300)
    second = cluster.get(agent.get.remote(half), timeout=300)
    assert first[0] == second[0] == list(range(half))
    assert second[1] == [float(half + i) for i in range(half)]
    failed = [i for i, outcome in enumerate(first[2]["reward_outcome"]) if outcome == "failed"]
    assert failed == [7]


@pytest.mark.integration
def test_the_process_of_the_actor_collects_garbage_less_often(cluster):
    from reward_loop.agent.ray_agent import RayAsyncRewardAgent

    def compute_score(solution_str):
        import gc

        return gc.get_threshold()[0]

    agent = RayAsyncRewardAgent.remote(compute_score)
    assert cluster.get(agent.compute_reward_pipeline.remote(numbered(1)), timeout=300) == 1
    assert cluster.get(agent.get.remote(1), timeout=300)[1] == [THRESHOLD]


@pytest.mark.integration
def test_an_actor_that_is_killed_loses_nothing(cluster, tmp_path):
    from reward_loop.agent.ray_agent import RayAsyncRewardAgent

    (tmp_path / "reward.py").write_text(
        """
import asyncio
import os
from pathlib import Path

async def compute_score(solution_str, folder, large):
    with open(f"{folder}/calls", "a") as file:
        file.write(f"{os.getpid()} {solution_str}\\n")
    while solution_str > "2" and not Path(folder, "go").exists():
        await asyncio.sleep(0.01)
    return float(solution_str)
"""
    )

    def calls():
        file = tmp_path / "calls"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def until(condition):
        for _ in range(30_000):
            if condition():
                return
            time.sleep(0.01)
        raise AssertionError("it did not happen within five minutes")

    # What is large is not kept by Ray for the actor's next start.
    kwargs = {"folder": str(tmp_path), "large": "x" * 1_000_000}
    agent = RayAsyncRewardAgent.remote(f"{tmp_path}/reward.py", reward_kwargs=kwargs)
    assert cluster.get(agent.compute_reward_pipeline.remote(numbered(6), group_size=2), timeout=300) == 6
    until(lambda: len(calls()) == 6)
    assert cluster.get(agent.get.remote(2), timeout=300)[0] == [0, 1]

    def in_journal():
        return sum(len(entry.rewards) for entry in cluster.get(agent.journal.entries.remote()).values())

    until(lambda: in_journal() == 3)
    rest = agent.get.remote(4)
    os.kill(int(calls()[0][0]), signal.SIGKILL)
    until(lambda: len(calls()) == 9)
    (tmp_path / "go").touch()
    assert cluster.get(rest, timeout=300)[:2] == ([2, 3, 4, 5], [2, 3, 4, 5])
    assert sorted(name for _, name in calls()) == ["0", "1", "2", "3", "3", "4", "4", "5", "5"]
    assert len({pid for pid, _ in calls()}) == 2

    # The journal is killed, and told everything with the next batch; then the agent once more.
    cluster.kill(agent.journal, no_restart=False)
    assert cluster.get(agent.compute_reward_pipeline.remote(numbered(2, start=6)), timeout=300) == 2
    until(lambda: in_journal() == 8)
    os.kill(int(calls()[-1][0]), signal.SIGKILL)
    assert cluster.get(agent.get.remote(2), timeout=300)[1] == [6, 7]
    assert len(calls()) == 11
