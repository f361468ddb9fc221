"""What the trainer does with rewards, without a run: TransferQueue is a dict here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ActorDiedError
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.verl import trainer
from reward_loop.verl.gdpo import GDPO, component_rewards, use_rewards
from reward_loop.verl.token_rewards import place
from tests.verl.configs import settled

pytestmark = pytest.mark.integration  # imports verl

SINGLE = torch.tensor([1, 1, 1, 1])
TOOL = torch.tensor([1, 1, 0, 0, 1, 1, 0])


@pytest.mark.parametrize(
    ("mask", "info", "placed"),
    [
        (SINGLE, {}, [0, 0, 0, 2]),
        (SINGLE, {"token_level_scores": [0.5, 0.5, 0.5, 0.5]}, [0.5, 0.5, 0.5, 0.5]),
        (SINGLE, {"token_level_scores": [1, 0, 0, 0]}, [1, 0, 0, 1]),
        (SINGLE, {"turn_level_scores": [2]}, [0, 0, 0, 2]),
        (TOOL, {"turn_level_scores": [0.5, 1]}, [0, 0.5, 0, 0, 0, 1, 0.5]),
        (TOOL, {"turn_level_scores": [1, 1], "token_level_scores": [0.25] * 7}, None),
    ],
)
def test_parts_are_placed_and_add_up_to_the_reward(mask: torch.Tensor, info: dict, placed: list[float] | None) -> None:
    result = place(2.0, mask, info)
    assert result.sum() == 2.0
    if placed is not None:
        assert result.tolist() == placed


@pytest.mark.parametrize("info", [{"turn_level_scores": [1]}, {"token_level_scores": [1, 1]}])
def test_parts_that_do_not_fit_are_refused(info: dict) -> None:
    with pytest.raises(ValueError, match="and the response has"):
        place(2.0, TOOL, info)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, torch.Tensor]]:
    rows: dict[str, dict[str, torch.Tensor]] = {}

    def get(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, torch.Tensor]:
        return {
            field: torch.nested.as_nested_tensor([rows[key][field] for key in keys], layout=torch.jagged)
            for field in select_fields
        }

    def put(keys: list[str], partition_id: str, fields: Any) -> None:
        for field in fields.keys():  # noqa: SIM118
            for key, value in zip(keys, fields[field].unbind(), strict=True):
                rows[key][field] = value

    monkeypatch.setattr(trainer, "tq", SimpleNamespace(kv_batch_get=get, kv_batch_put=put))
    return rows


def test_the_parts_of_a_sessions_last_output_reach_the_trainer(queue: dict[str, dict[str, torch.Tensor]]) -> None:
    for key, mask in {"q_0_0": SINGLE, "q_0_1": TOOL, "q_1_0": TOOL, "q_2_0": SINGLE}.items():
        queue[key] = {"response_mask": mask, "rm_scores": torch.tensor([0.0] * (len(mask) - 1) + [2.0])}
    parts = {"turn_level_scores": [1.0, 0.5], "reward_masked": False}
    infos = {"q_0_0": parts, "q_0_1": parts, "q_1_0": {"turn_level_scores": [1.0]}, "q_2_0": {"score": 2.0}}
    trainer._place_parts(SimpleNamespace(partition_id="train"), infos)
    assert queue["q_0_0"]["rm_scores"].tolist() == [0, 0, 0, 2]  # an earlier output
    assert queue["q_0_1"]["rm_scores"].tolist() == [0, 1, 0, 0, 0, 0.5, 0.5]
    assert queue["q_2_0"]["rm_scores"].tolist() == [0, 0, 0, 2]
    assert (infos["q_1_0"]["reward_masked"], infos["q_1_0"]["reward_outcome"]) == (True, "failed")
    assert "q_1_0: the function returned 1 turn_level_scores" in infos["q_1_0"]["reward_error"]


@pytest.mark.parametrize(
    ("mode", "question"),
    [
        ("sync", "raise_fatal_error"),
        # Samples of later steps are out, so that a worker may be too busy to answer.
        ("reward_pipeline", "ask_for_fatal_error"),
        ("separate_async", "ask_for_fatal_error"),
    ],
)
def test_a_process_that_died_is_named_unless_a_reward_worker_knows_why_the_run_must_stop(
    mode: str, question: str
) -> None:
    told: list[str] = []

    def raise_fatal_error() -> None:
        if told:
            raise RewardLoopError(told[0])

    run = object.__new__(trainer.with_reward_loop(PPOTrainerSync))
    run._full_config = settled(f"trainer.v1.trainer_mode={mode}")
    run.reward_workers = SimpleNamespace(**{question: raise_fatal_error})  # type: ignore[assignment]
    with pytest.raises(RewardLoopError, match=r"a process of the run died.*unexpectedly"), run._told_by_workers():
        raise ActorDiedError
    told.append("the judge is on strike")
    with pytest.raises(RewardLoopError, match="on strike"), run._told_by_workers():
        raise ActorDiedError


def test_gdpo_normalises_each_reward_on_its_own() -> None:
    from verl.trainer.ppo.core_algos import compute_gdpo_outcome_advantage, get_adv_estimator_fn

    keys = [f"{uid}_{session}_0" for uid in "pq" for session in range(4)] + ["padding"]
    rng = np.random.default_rng(7)
    infos = {key: {"right": float(rng.integers(2)), "brief": float(rng.normal())} for key in keys[:-1]}
    infos["q_3_0"] = {"reward_masked": True}
    mask = torch.ones(len(keys), 6)
    mask[1, 4:] = mask[7] = mask[8] = 0
    groups = np.array([*"ppppqqq", "masked", "padding"], dtype=object)
    config = {"gdpo_reward_keys": ["right", "brief"], "gdpo_reward_weights": [1.0, 0.5]}
    rewards = component_rewards(keys, infos, config["gdpo_reward_keys"])
    assert rewards["right"].tolist() == [infos[key].get("right", 0.0) for key in keys[:-1]] + [0.0]
    with use_rewards(rewards):
        ours, _ = get_adv_estimator_fn(GDPO)(torch.zeros_like(mask), mask, index=groups, config=config)

    total = torch.zeros(len(keys))
    for name, weight in zip(config["gdpo_reward_keys"], config["gdpo_reward_weights"], strict=True):
        values = torch.tensor(rewards[name])
        for group in "pq":
            rows = torch.tensor(groups == group)
            total[rows] += weight * (values[rows] - values[rows].mean()) / (values[rows].std() + 1e-6)
    counted = (total.unsqueeze(-1) * mask)[mask > 0]
    expected = (total - counted.mean()) / torch.sqrt(counted.var() + 1e-8)
    assert torch.allclose(ours, expected.unsqueeze(-1) * mask, atol=1e-4)
    assert ours[:7].abs().max() > 0.1

    batch = {"prompts": torch.zeros(len(keys), 3), "attention_mask": torch.ones(len(keys), 9, dtype=torch.long)}
    theirs, _ = compute_gdpo_outcome_advantage(
        torch.zeros_like(mask), mask, groups, config=config, non_tensor_batch=rewards, batch=batch
    )
    assert torch.equal(ours, theirs)


def test_a_row_without_a_reward_of_gdpo_is_named() -> None:
    with pytest.raises(ConfigError, match=r"names 'brief', which rollout q_0_0 does not have"):
        component_rewards(["q_0_0"], {"q_0_0": {"right": 1.0}}, ["right", "brief"])
