"""The managers whose functions run in processes, beside verl's own on real data."""

import os

import pytest

from reward_loop import FunctionLoadError, RewardSample
from reward_loop.managers import PrimeRewardLoopManager, RemoteRewardLoopManager, get

MANAGERS = [RemoteRewardLoopManager, PrimeRewardLoopManager]


def process_id():
    return os.getpid()


def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise ValueError
    return {"score": float(solution_str == ground_truth), "level": extra_info["level"]}


async def judge(solution_str):
    return 1.0


@pytest.mark.parametrize("cls", MANAGERS)
async def test_the_function_runs_in_a_process(cls):
    manager = cls(compute_score=process_id)
    reward = await manager.run_single(RewardSample(""))
    assert reward["reward_score"] != os.getpid()
    manager.function.close()


def test_their_names():
    assert [get(name) for name in ("remote", "prime")] == MANAGERS


@pytest.mark.parametrize("cls", MANAGERS)
def test_async_functions_are_refused(cls):
    with pytest.raises(FunctionLoadError, match=r"judge .* is async"):
        cls(compute_score=judge)


@pytest.mark.parametrize(
    ("cls", "options", "count"),
    [
        (RemoteRewardLoopManager, {}, 3),
        (RemoteRewardLoopManager, {"max_processes": 2}, 2),
        (PrimeRewardLoopManager, {}, 21),
        (PrimeRewardLoopManager, {"max_processes": 2}, 2),
    ],
)
async def test_as_many_processes_as_verl_would_start(cls, options, count):
    """So many calls can meet, and no more."""
    cls({"reward": {"num_workers": 3}, "reward_loop": options}, compute_score=process_id)
