"""Our managers beside the installed verl's, of the same names, on real answers, both loaded by verl itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from reward_loop import managers
from reward_loop.scoring import ListScoringFunction
from tests.managers.rows import CharTokenizer, data_proto, gsm8k, split
from tests.support.gsm8k import needs_gsm8k

pytestmark = pytest.mark.integration

QUESTIONS = 50

SOURCE = """
from verl.utils.reward_score import default_compute_score

def number(data_source, solution_str, ground_truth, extra_info):
    return default_compute_score(data_source, solution_str, ground_truth)

async def several(data_source, solution_str, ground_truth, extra_info):
    right = default_compute_score(data_source, solution_str, ground_truth)
    return {"score": right + 0.1 * extra_info["index"], "right": right, "brief": float(len(solution_str) < 200)}

def scaled(data_source, solution_str, ground_truth, extra_info, scale):
    return scale * default_compute_score(data_source, solution_str, ground_truth)

def lists(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
    assert len(data_sources) == len(solution_strs) == len(ground_truths) == len(extra_infos)
    rows = zip(data_sources, solution_strs, ground_truths)
    scores = [default_compute_score(*row) for row in rows]
    return [{"score": scale * score, "length": len(text)} for score, text in zip(scores, solution_strs)]

def plain_lists(data_sources, solution_strs, ground_truths, extra_infos):
    return [default_compute_score(*row) for row in zip(data_sources, solution_strs, ground_truths)]
"""

WITHOUT_VERL = """
def number(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.endswith(f"#### {ground_truth}"))

def lists(data_sources, solution_strs, ground_truths, extra_infos):
    return [number(*row) for row in zip(data_sources, solution_strs, ground_truths, extra_infos)]
"""
"""Some managers run functions in processes of their own, for which an import of verl takes long."""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("parity") / "reward.py"
    path.write_text(SOURCE)
    return str(path)


def load(
    path: str | None,
    function: str,
    cls: type,
    verl_name: str | None = None,
    reward_loop: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    **reward: Any,
) -> tuple[Any, Any]:
    """Our manager, and verl's of that name, both from verl's own loader."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.reward import load_reward_manager

    config = OmegaConf.create(
        {
            "reward": {
                "reward_manager": {
                    "source": "importlib",
                    "name": cls.__name__,
                    "module": {"path": "pkg://reward_loop.managers", "name": "unused"},
                },
                "custom_reward_function": {"path": path, "name": function, "reward_kwargs": arguments or {}},
                **reward,
            },
            "actor_rollout_ref": {"rollout": {"n": 4}},
            "reward_loop": reward_loop,
        }
    )
    keywords = {"reward_router_address": None, "reward_model_tokenizer": None}
    ours = load_reward_manager(config, CharTokenizer(), **keywords)
    assert type(ours) is cls
    if verl_name is None:
        return ours, None
    config.reward.reward_manager.update({"source": "register", "name": verl_name})
    theirs = load_reward_manager(config, CharTokenizer(), **keywords)
    assert type(theirs).__module__.startswith("verl.")
    return ours, theirs


async def score_all(manager: Any, data: Any) -> list[Any]:
    return await asyncio.gather(*(manager.run_single(row) for row in split(data)))


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs) > 1
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine["reward_score"] == pytest.approx(float(expected["reward_score"]), abs=1e-6)
        info = mine["reward_extra_info"]
        for key, value in expected["reward_extra_info"].items():
            assert info[key] == (pytest.approx(float(value), abs=1e-6) if not isinstance(value, str) else value), key
        assert info["reward_outcome"] == "scored"
    assert len({mine["reward_score"] for mine in ours}) > 1, "the data does not tell scores apart"


OVERLONG = {"enable": True, "len": 64, "penalty_factor": 0.7, "log": True}


@needs_gsm8k
@pytest.mark.parametrize(
    ("name", "cls", "function", "reward"),
    [
        ("naive", managers.NaiveRewardLoopManager, "number", {}),
        ("naive", managers.NaiveRewardLoopManager, "several", {}),
        ("naive", managers.NaiveRewardLoopManager, "scaled", {"arguments": {"scale": 3}}),
        (
            "dapo",
            managers.DAPORewardLoopManager,
            "number",
            {"reward_kwargs": {"max_resp_len": 256, "overlong_buffer_cfg": OVERLONG}},
        ),
        (
            "dapo",
            managers.DAPORewardLoopManager,
            "several",
            {"reward_kwargs": {"max_resp_len": 256, "overlong_buffer_cfg": {**OVERLONG, "log": False}}},
        ),
    ],
)
async def test_the_same_rewards(functions: str, name: str, cls: type, function: str, reward: dict) -> None:
    ours, theirs = load(functions, function, cls, name, **reward)
    data = gsm8k(QUESTIONS)
    mine = await score_all(ours, data)
    # verl's write into the rows' extra info, so that they come second.
    assert_same(mine, await score_all(theirs, data))


@needs_gsm8k
@pytest.mark.parametrize("function", ["lists", "plain_lists"])
async def test_the_same_rewards_as_verls_batch_manager(functions: str, function: str) -> None:
    import torch
    from verl.utils.import_utils import load_extern_object
    from verl.workers.reward_manager import get_reward_manager_cls

    raw = load_extern_object(functions, function)
    theirs = get_reward_manager_cls("batch")(CharTokenizer(), num_examine=0, compute_score=raw)
    ours, _ = load(functions, function, managers.BatchRewardLoopManager)
    data = gsm8k(QUESTIONS)
    mine = await score_all(ours, data)
    expected = theirs(data, return_dict=True)
    scores = expected["reward_tensor"].sum(dim=1)
    assert torch.equal(scores, torch.tensor([reward["reward_score"] for reward in mine]))
    assert len(set(scores.tolist())) > 1
    if function == "lists":
        lengths = [reward["reward_extra_info"]["length"] for reward in mine]
        assert lengths == expected["reward_extra_info"]["length"]
    tensor = managers.BatchRewardLoopManager.assemble_rm_scores(data, scores.tolist())
    assert torch.equal(tensor, expected["reward_tensor"])


@needs_gsm8k
async def test_groups_of_verls_rows(functions: str) -> None:
    ours, _ = load(functions, "lists", managers.GroupRewardLoopManager)
    rewards = await score_all(ours, gsm8k(QUESTIONS))
    one_by_one, _ = load(functions, "number", managers.NaiveRewardLoopManager)
    assert_same(rewards, [{**r, "reward_extra_info": {}} for r in await score_all(one_by_one, gsm8k(QUESTIONS))])


@pytest.mark.parametrize("cls", [managers.NaiveRewardLoopManager, managers.DAPORewardLoopManager])
async def test_verls_own_rules_by_data_source(cls: type) -> None:
    known, unknown = {"data_source": ["lighteval/MATH"]}, {"data_source": ["nonesuch"]}
    other = {"reward_model": [{"ground_truth": "\\frac{1}{2}"}], "extra_info": [{}]}
    ours, theirs = load(None, "compute_score", cls, "naive" if cls is managers.NaiveRewardLoopManager else "dapo")
    data = data_proto(["so \\boxed{\\frac{1}{2}}"], **known, **other)
    mine, expected = await ours.run_single(data), await theirs.run_single(data)
    assert mine["reward_score"] == expected["reward_score"] == 1.0
    data = data_proto(["?"], **unknown, **other)
    with pytest.raises(NotImplementedError) as error:
        await theirs.run_single(data)
    info = (await ours.run_single(data))["reward_extra_info"]
    assert info["reward_outcome"] == "failed"
    assert f"NotImplementedError: {error.value}" in info["reward_error"]


@pytest.mark.parametrize("name", ["naive", "dapo", "batch", "group"])
async def test_verl_loads_every_manager(tmp_path: Path, name: str) -> None:
    (tmp_path / "reward.py").write_text(WITHOUT_VERL)
    functions = str(tmp_path / "reward.py")
    function = "lists" if managers.get(name).function_type is ListScoringFunction else "number"
    data = data_proto(
        ["so #### 4", "so #### 5", "4", "#### 4"],
        data_source=["openai/gsm8k"] * 4,
        reward_model=[{"ground_truth": "4", "style": "rule"}] * 4,
        extra_info=[{"index": 0}] * 4,
        uid=["q"] * 4,
    )
    ours, _ = load(
        functions,
        function,
        managers.get(name),
    )
    try:
        rewards = await score_all(ours, data)
    finally:
        await asyncio.to_thread(ours.close)
    assert [reward["reward_score"] for reward in rewards] == [1, 0, 0, 1]
