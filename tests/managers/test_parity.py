"""Our managers beside the installed verl's, of the same names, both loaded by verl itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from reward_loop import managers
from tests.managers.letters import column

pytestmark = pytest.mark.integration

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

ANSWERS = ("#### 4", "#### 5", "So it is 4.", "#### 4.0", "It costs $4.\n#### $4", "#### 1,004", "#### -4", "4\n#### 4")


class CharTokenizer:
    """A token is a character."""

    eos_token = "\x03"

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(int(i)) for i in ids if int(i) > 3)


def data_proto(responses: list[str], data_source: str, ground_truth: str) -> Any:
    """A padded batch of groups of four in verl's format; each call makes its own copy of what could be changed."""
    import torch
    from verl import DataProto

    width, count = max(map(len, responses)) + 3, len(responses)
    padded = [[*map(ord, text), *[0] * (width - len(text))] for text in responses]
    columns: dict[str, list[Any]] = {
        "data_source": [data_source] * count,
        "reward_model": [{"ground_truth": ground_truth, "style": "rule"} for _ in responses],
        "extra_info": [{"index": row // 4} for row in range(count)],
        "uid": [f"q{row // 4}" for row in range(count)],
        "session_id": [row % 4 for row in range(count)],
        "__num_turns__": [2] * count,
    }
    tensors = {
        "prompts": torch.tensor([[0, ord("Q"), ord(":")]] * count),
        "responses": torch.tensor(padded),
        "attention_mask": torch.tensor([[0, 1, 1, *(int(i > 0) for i in row)] for row in padded]),
    }
    return DataProto.from_dict(tensors, {name: column(*values) for name, values in columns.items()})


def answers() -> Any:
    """Right and wrong answers of several lengths."""
    texts = [f"{'Let me think. ' * length}\n{answer}" for length in (0, 12, 16, 30) for answer in ANSWERS]
    return data_proto(texts, "openai/gsm8k", "4")


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
    return await asyncio.gather(*(manager.run_single(row) for row in data.split(1)))


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


def overlong(**changed: Any) -> dict[str, Any]:
    return {"reward_kwargs": {"max_resp_len": 256, "overlong_buffer_cfg": {**OVERLONG, **changed}}}


@pytest.mark.parametrize(
    ("name", "cls", "function", "reward"),
    [
        ("naive", managers.NaiveRewardLoopManager, "number", {}),
        ("naive", managers.NaiveRewardLoopManager, "several", {}),
        ("naive", managers.NaiveRewardLoopManager, "scaled", {"arguments": {"scale": 3}}),
        ("dapo", managers.DAPORewardLoopManager, "number", overlong()),
        ("dapo", managers.DAPORewardLoopManager, "several", overlong(log=False)),
    ],
)
async def test_the_same_rewards(functions: str, name: str, cls: type, function: str, reward: dict) -> None:
    ours, theirs = load(functions, function, cls, name, **reward)
    data = answers()
    mine = await score_all(ours, data)
    # verl's write into the rows' extra info, so that they come second.
    assert_same(mine, await score_all(theirs, data))


@pytest.mark.parametrize("function", ["lists", "plain_lists"])
async def test_the_same_rewards_as_verls_batch_manager(functions: str, function: str) -> None:
    import torch
    from verl.utils.import_utils import load_extern_object
    from verl.workers.reward_manager import get_reward_manager_cls

    raw = load_extern_object(functions, function)
    theirs = get_reward_manager_cls("batch")(CharTokenizer(), num_examine=0, compute_score=raw)
    ours, _ = load(functions, function, managers.BatchRewardLoopManager)
    data = answers()
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


async def test_groups_of_verls_rows(functions: str) -> None:
    ours, _ = load(functions, "lists", managers.GroupRewardLoopManager)
    rewards = await score_all(ours, answers())
    one_by_one, _ = load(functions, "number", managers.NaiveRewardLoopManager)
    assert_same(rewards, [{**r, "reward_extra_info": {}} for r in await score_all(one_by_one, answers())])


@pytest.mark.parametrize(
    ("name", "cls"), [("naive", managers.NaiveRewardLoopManager), ("dapo", managers.DAPORewardLoopManager)]
)
async def test_verls_own_rules_by_data_source(name: str, cls: type) -> None:
    ours, theirs = load(None, "compute_score", cls, name)
    data = data_proto(["so \\boxed{\\frac{1}{2}}"], "lighteval/MATH", "\\frac{1}{2}")
    mine, expected = await ours.run_single(data), await theirs.run_single(data)
    assert mine["reward_score"] == expected["reward_score"] == 1.0
    data = data_proto(["?"], "nonesuch", "4")
    with pytest.raises(NotImplementedError) as error:
        await theirs.run_single(data)
    info = (await ours.run_single(data))["reward_extra_info"]
    assert info["reward_outcome"] == "failed"
    assert f"NotImplementedError: {error.value}" in info["reward_error"]
