import asyncio

import numpy as np
import pytest

pytest.importorskip("ray")

from reward_loop import ConfigError, RewardFunctionError, RewardLoopError, RewardSample
from reward_loop.agent.ray_agent import AsyncRewardAgent
from tests.agent.judges import Gate, numbered
from tests.support.clock import within
from tests.support.local_ray import local_ray


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


async def test_the_samples_of_a_prompt_are_neighbours():
    agent = AsyncRewardAgent(lambda solution_str: float(solution_str))
    # The last three would hand out parts of prompts, whose advantages would be wrong.
    for uids, size in (("aaab", 4), ("abcb", 4), ("abab", 2), ("aaaa", 2), ("aabb", 1)):
        with pytest.raises(ConfigError, match=r"put the samples of a prompt next to each other"):
            await agent.compute_reward_pipeline([RewardSample("", uid=uid) for uid in uids], group_size=size)
    for uids in ("aabb", "abcd"):
        assert await agent.compute_reward_pipeline([RewardSample("1", uid=uid) for uid in uids], group_size=2) == 4


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


class DataProto:
    def __init__(self, count):
        torch = pytest.importorskip("torch")
        self.batch = {
            "responses": torch.arange(count)[:, None].repeat(1, 4),
            "attention_mask": torch.tensor([[1] * (2 + 1 + i % 4) + [0] * (3 - i % 4) for i in range(count)]),
        }
        uids = np.array([f"u{i // 2}" for i in range(count)], dtype=object)
        self.non_tensor_batch = {"uid": uids}

    def __len__(self):
        return len(self.batch["responses"])

    def __getitem__(self, rows):
        part = DataProto(0)
        part.batch = {key: value[rows] for key, value in self.batch.items()}
        part.non_tensor_batch = {key: value[rows] for key, value in self.non_tensor_batch.items()}
        return part


@pytest.mark.processes
@pytest.mark.parametrize("skips", [True, False])
async def test_the_rewards_of_a_data_proto_are_a_tensor(skips):
    torch = pytest.importorskip("torch")

    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            assert skip_special_tokens == skips
            return str(int(ids[0]) + 1)

    options = {"skip_special_tokens": skips}
    agent = AsyncRewardAgent(lambda solution_str: float(solution_str), config=options, tokenizer=Tokenizer())
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


@pytest.fixture(scope="module")
def cluster():
    import ray

    with local_ray(log_to_driver=False):
        yield ray


@pytest.mark.integration
def test_the_actor(cluster, tmp_path):
    from reward_loop.agent.ray_agent import RayAsyncRewardAgent

    # A call ends only when all are in flight at once, in one process.
    (tmp_path / "reward.py").write_text("""
import asyncio
everyone = asyncio.Barrier(3_000)

async def compute_score(solution_str):
    await everyone.wait()
    return float(solution_str)
""")
    half = 1_500
    agent = RayAsyncRewardAgent.remote(f"{tmp_path}/reward.py")
    for start in (0, half):
        size = agent.compute_reward_pipeline.remote(numbered(half, start=start), group_size=5)
        assert cluster.get(size, timeout=300) == half
    for start in (0, half):
        indices, rewards, _ = cluster.get(agent.get.remote(half), timeout=300)
        assert (indices, rewards) == (list(range(half)), [float(start + i) for i in range(half)])
