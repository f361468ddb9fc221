"""The managers whose functions run in processes, beside verl's own."""

import os

import pytest

from reward_loop import FunctionLoadError, RewardSample
from reward_loop.managers import PrimeRewardLoopManager, RemoteRewardLoopManager, get
from tests.local_ray import local_ray
from tests.managers.rows import CharTokenizer, data_proto

MANAGERS = [RemoteRewardLoopManager, PrimeRewardLoopManager]


def process_id():
    return os.getpid()


async def judge(solution_str):
    return 1.0


def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise ValueError
    return {"score": float(solution_str == ground_truth), "level": extra_info["level"], "source": data_source}


def number(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise ValueError
    return float(solution_str == ground_truth) * extra_info["level"]


def test_their_names():
    assert [get(name) for name in ("remote", "prime")] == MANAGERS


@pytest.mark.parametrize("cls", MANAGERS)
async def test_the_function_runs_in_a_process(cls):
    manager = cls(compute_score=process_id)
    reward = await manager.run_single(RewardSample(""))
    assert reward["reward_score"] != os.getpid()
    manager.function.close()


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
def test_as_many_processes_as_in_verl(cls, options, count):
    manager = cls({"reward": {"num_workers": 3}, "reward_loop": options}, compute_score=process_id)
    assert f"max_processes={count}," in repr(manager.function)


def row(text, level):
    """A rollout as verl's agent loop passes it on."""
    reward_model = {"ground_truth": "yes", "style": "rule"}
    return data_proto([text], data_source=["math"], reward_model=[reward_model], extra_info=[{"level": level}])


@pytest.mark.integration
async def test_remote_gives_what_verls_remote_gives():
    pytest.importorskip("verl")
    from omegaconf import OmegaConf
    from verl.experimental.reward_loop.reward_manager.remote import RemoteRewardManager

    config = OmegaConf.create({"reward": {"num_workers": 1}})
    ours = RemoteRewardLoopManager(config, CharTokenizer(), compute_score)
    with local_ray():
        theirs = RemoteRewardManager(config, CharTokenizer(), compute_score)
        for text in ("yes", "no"):
            expected = await theirs.run_single(row(text, 2))
            reward = await ours.run_single(row(text, 2))
            assert reward["reward_score"] == expected["reward_score"]
            info = reward["reward_extra_info"]
            assert {key: info[key] for key in expected["reward_extra_info"]} == expected["reward_extra_info"]
    ours.function.close()


@pytest.mark.integration
async def test_prime_gives_what_verls_prime_gives():
    pytest.importorskip("verl")
    from verl.workers.reward_manager.prime import parallel_compute_score_async

    texts = ["yes", "no", "raise", "yes"]
    expected = await parallel_compute_score_async(
        number, texts, ["yes"] * 4, ["math"] * 4, [{"level": level} for level in range(4)], num_processes=2
    )
    manager = PrimeRewardLoopManager({"max_processes": 2}, CharTokenizer(), number)
    rewards = [await manager.run_single(row(text, level)) for level, text in enumerate(texts)]
    assert [reward["reward_score"] for reward in rewards] == expected == [0.0, 0.0, 0.0, 3.0]
    assert [reward["reward_extra_info"]["reward_outcome"] for reward in rewards][2] == "failed"
    manager.function.close()
