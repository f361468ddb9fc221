"""`post_process_scores`: each `run_single` returns when its group is processed, in any manager."""

import asyncio

import pytest

from reward_loop import ConfigError, NaiveRewardLoopManager, RewardSample
from reward_loop.managers import DAPORewardLoopManager
from reward_loop.managers.groups import CALLER, Caller
from reward_loop.records import RecordsReader, records
from tests.support.clock import settle, within


class Centred:
    """Takes the mean off each group's scores."""

    def __init__(self, *gated):
        self.given = []
        self.gates = {text: asyncio.Event() for text in gated}
        """The texts whose scores wait."""

    async def compute_score(self, solution_str):
        if gate := self.gates.get(solution_str):
            await gate.wait()
        if solution_str == "bad":
            raise ValueError("boom")
        return None if solution_str == "none" else float(solution_str)

    def post_process_scores(self, scores):
        self.given.append(scores)
        mean = sum(scores) / len(scores)
        return [score - mean for score in scores]


def made(judge, cls=NaiveRewardLoopManager, **options):
    return cls({"max_failed_share": 1, **options}, compute_score=judge)


def samples(*texts, group="q", size=None):
    size = size or len(texts)
    return [RewardSample(text, uid=f"{group}_{i}", group=group, group_size=size) for i, text in enumerate(texts)]


async def run(manager, sample, **caller):
    """As a trainer that reports lost samples: then no timeout applies."""
    CALLER.set(Caller(reports_lost=True, **caller))
    reward = await manager.run_single(sample)
    return reward["reward_score"], reward["reward_extra_info"]


async def together(manager, found, **caller):
    return [score for score, _ in await within(asyncio.gather(*(run(manager, one, **caller) for one in found)))]


async def test_rewards_are_final_and_samples_are_scored_at_once(tmp_path):
    judge = Centred("3")
    manager = made(judge, log_dir=str(tmp_path))
    tasks = [asyncio.create_task(run(manager, sample)) for sample in samples("1", "3", "none", "bad")]
    await settle()
    # Those without a score are final, and the scored ones wait for the last of their group.
    assert [task.done() for task in tasks] == [False, False, True, True]
    judge.gates["3"].set()
    (first, info), (second, _) = await within(asyncio.gather(*tasks[:2]))
    assert (first, second) == (-1, 1)
    assert (info["acc"], info["raw_score"], info["reward_outcome"]) == (1, 1, "scored")
    assert judge.given == [[1, 3]]
    await asyncio.to_thread(records(tmp_path).flush)
    rows = {row["uid"]: (row["score"], row["reward"]) for row in RecordsReader(tmp_path).rows()}
    assert rows == {"q_0": (-1, -1), "q_1": (1, 1), "q_2": (None, None), "q_3": (None, None)}


async def test_the_method_gets_the_functions_own_numbers_in_the_order_of_the_members():
    judge = Centred()
    found = samples("0.7", "0.1", "0.30000000000000004")
    await together(made(judge), reversed(found))
    assert judge.given == [[0.7, 0.1, 0.30000000000000004]]
    # Without numbers in their names: in the order in which they were submitted.
    judge.gates["5"] = asyncio.Event()
    manager = made(judge)
    tasks = [asyncio.create_task(run(manager, RewardSample(text, group="p", group_size=2))) for text in "54"]
    await settle()
    judge.gates["5"].set()
    await asyncio.gather(*tasks)
    assert judge.given[-1] == [5, 4]


async def test_a_group_closes_without_the_samples_that_leave_or_are_lost():
    judge = Centred("7")
    manager = made(judge)
    tasks = [asyncio.create_task(run(manager, sample)) for sample in samples("1", "3", "7", size=4)]
    await settle()
    manager.groups.lose("q", 4, ["q_3"])
    manager.groups.lose("q", 4, ["q_3"])  # reported again
    await settle()
    assert not any(task.done() for task in tasks)
    tasks[2].cancel()
    assert [score for score, _ in await within(asyncio.gather(*tasks[:2]))] == [-1, 1]
    # Reported first, and all others fail.
    manager.groups.lose("p", 2, ["p_1"])
    assert await together(manager, samples("bad", group="p", size=2)) == [0]
    assert manager.groups._open == {}
    # A scored sample that is cancelled while it waits leaves, too.
    tasks = [asyncio.create_task(run(manager, sample)) for sample in samples("2", "4", group="r", size=3)]
    await settle()
    tasks[0].cancel()
    assert await together(manager, samples("x", "y", "6", group="r")[2:]) == [1]
    assert (await tasks[1])[0] == -1


async def test_a_sample_that_is_submitted_twice_counts_once():
    """A trainer repeats a call whose connection was lost, while the first one may still run."""
    judge = Centred("1")
    manager = made(judge)
    first, second = samples("1", "3")
    lost = asyncio.create_task(run(manager, first, repeats=True))
    other = asyncio.create_task(run(manager, second, repeats=True))
    await settle()
    again = asyncio.create_task(run(manager, first, repeats=True))
    await settle()
    judge.gates["1"].set()
    assert [score for score, _ in await within(asyncio.gather(again, other))] == [-1, 1]
    assert judge.given == [[1, 3]]
    assert lost.cancelled() or (await lost)[0] == -1


async def test_of_a_sample_that_is_submitted_twice_the_last_caller_gets_the_reward_also_if_it_is_scored_first():
    judge = Centred("1")
    manager = made(judge)
    first, second = samples("1", "3")
    lost = asyncio.create_task(run(manager, first, repeats=True))
    await settle()
    slow = judge.gates.pop("1")
    again, other = (asyncio.create_task(run(manager, one, repeats=True)) for one in (first, second))
    await settle()
    slow.set()
    assert [score for score, _ in await within(asyncio.gather(again, other))] == [-1, 1]
    assert judge.given == [[1, 3]]
    assert lost.cancelled()


async def test_a_sample_that_joins_its_group_twice_is_an_error_and_no_endless_wait():
    class Twice(NaiveRewardLoopManager):
        async def score_one(self, sample):
            await super().score_one(sample)
            return await super().score_one(sample)

    with pytest.raises(ConfigError, match="once for each sample"):
        await together(made(Centred(), Twice), samples("1", "3"))


async def test_the_penalty_of_dapo_comes_after():
    buffer = {"enable": True, "len": 2, "penalty_factor": 1.0}
    config = {
        "reward": {"reward_kwargs": {"max_resp_len": 4, "overlong_buffer_cfg": buffer}},
        "actor_rollout_ref": {"rollout": {"n": 2}},
        "reward_model": {"use_reward_loop": True},
    }
    judge = Centred()
    manager = DAPORewardLoopManager(config, compute_score=judge)
    found = [RewardSample(text, uid=text, group="q", response_length=4) for text in ("1", "3")]
    assert await together(manager, found) == [-2, 0]
    assert judge.given == [[1, 3]]


async def test_dense_rewards_that_do_not_fit_fail_before_the_group_is_compared():
    class Dense(Centred):
        async def compute_score(self, solution_str):
            return {"score": float(solution_str), "turn_level_scores": [0.5, 0.5]}

    judge = Dense()
    found = [
        RewardSample(text, uid=text, group="q", group_size=3, turn_count=n)
        for text, n in zip("138", (2, 2, 1), strict=True)
    ]
    manager = made(judge)
    first, second, third = await asyncio.gather(*(run(manager, one) for one in found))
    assert judge.given == [[1, 3]]
    assert (first[0], second[0], third[0]) == (-1, 1, 0)
    assert "2 turn_level_scores, and the response has 1 turns" in third[1]["reward_error"]


async def test_an_override_that_calls_the_function_itself_is_processed_too():
    class Own(NaiveRewardLoopManager):
        async def score_one(self, sample):
            return await self.function(sample)

    assert await together(made(Centred(), Own), samples("1", "3")) == [-1, 1]


async def test_a_timeout_applies_only_where_nobody_reports_lost_samples():
    judge = Centred("3")
    manager = made(judge, group={"timeout": 0.05})
    slow = asyncio.create_task(together(manager, samples("1", "3")))
    # A sample that is being scored is not missing.
    unreported = [asyncio.create_task(manager.run_single(one)) for one in samples("1", "3", group="p")]
    await asyncio.sleep(0.3)
    assert not slow.done()
    assert not any(task.done() for task in unreported)
    judge.gates["3"].set()
    assert await slow == [-1, 1]
    assert [(await task)["reward_score"] for task in unreported] == [-1, 1]
    info = (await manager.run_single(samples("1", group="r", size=2)[0]))["reward_extra_info"]
    assert "group r: only 1 of 2 samples arrived within 0.05 s" in info["reward_error"]


async def test_sizes_of_groups():
    judge = Centred()
    assert await together(made(judge), [RewardSample("7")]) == [0]  # a group of its own
    assert await together(made(judge, group={"size": 2}), samples("1", "3", size=None)) == [-1, 1]
    with pytest.raises(ConfigError, match=r"post_process_scores of .* needs the size of each group"):
        await made(judge).run_single(RewardSample("7", group="q"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": {"num_workers": 8}}, r"reward\.num_workers=8: .* set reward\.num_workers=1, or set reward_model"),
        ({"reward": {"num_workers": 1}, "val": 1}, r"val_kwargs\.n=1: .* set it to actor_rollout_ref.rollout.n=4"),
        ({"reward": {"num_workers": 1}, "val": 4}, None),
        ({"reward": {"num_workers": 8}, "reward_model": {"use_reward_loop": True}}, None),
    ],
)
def test_verls_own_reward_loop_must_have_one_worker(changes, message):
    rollout = {"n": 4, "val_kwargs": {"n": changes.pop("val", 4)}}
    config = {"actor_rollout_ref": {"rollout": rollout}, "reward_model": {}, **changes}
    if message is None:
        NaiveRewardLoopManager(config, compute_score=Centred())
        return
    with pytest.raises(ConfigError, match=message):
        NaiveRewardLoopManager(config, compute_score=Centred())
