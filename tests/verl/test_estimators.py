"""Which of verl's advantage estimators give the same by mini-batches of whole groups as on the whole batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.protocol import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from reward_loop.verl.options import MINI_BATCH_ESTIMATORS
from reward_loop.verl.trainer.reward_loop_trainer import GROUP_ESTIMATORS

pytestmark = pytest.mark.integration  # imports verl

GROUPS, N, LENGTH = 6, 4, 7
CONFIG = OmegaConf.create({"norm_adv_by_std_in_grpo": True, "gamma": 1.0, "lam": 0.95, "use_pf_ppo": False})


def batch() -> tuple[DataProto, list[str]]:
    """Groups of several sizes, responses of several lengths, a reward on each one's last token."""
    draw = torch.Generator().manual_seed(0)
    sizes = [N, N - 1, N, N + 1, N, 2]
    uids = [f"u{group}" for group, size in enumerate(sizes) for _ in range(size)]
    keys = [f"u{group}_{session}_0" for group, size in enumerate(sizes) for session in range(size)]
    lengths = torch.randint(1, LENGTH + 1, (len(uids),), generator=draw)
    mask = (torch.arange(LENGTH) < lengths[:, None]).float()
    rewards = torch.zeros(len(uids), LENGTH)
    rewards[torch.arange(len(uids)), lengths - 1] = torch.rand(len(uids), generator=draw).round(decimals=1)
    values = torch.rand(len(uids), LENGTH, generator=draw) * mask
    data = DataProto.from_dict(
        {"token_level_rewards": rewards, "response_mask": mask, "values": values},
        {"uid": np.array(uids, dtype=object)},
    )
    return data, keys


def advantages(data: DataProto, keys: list[str], estimator: str) -> torch.Tensor:
    computed = compute_advantage_for_multi_trajectories(
        data, keys, estimator, gamma=1.0, lam=0.95, num_repeat=N, config=CONFIG
    )
    return computed.batch["advantages"]


@pytest.mark.parametrize("estimator", sorted(MINI_BATCH_ESTIMATORS))
def test_by_mini_batch_is_what_verl_computes_for_the_whole_batch(estimator: str) -> None:
    data, keys = batch()
    uids = data.non_tensor_batch["uid"]
    whole = advantages(data, keys, estimator)
    parts = torch.full_like(whole, torch.nan)
    for pair in (("u3", "u0"), ("u5", "u1"), ("u2", "u4")):
        rows = [row for uid in pair for row in np.flatnonzero(uids == uid)]
        data, keys = batch()
        parts[rows] = advantages(data.select_idxs(rows), [keys[row] for row in rows], estimator)
    assert whole.abs().max() > 0.1
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)


VERLS = set(core_algos.ADV_ESTIMATOR_REGISTRY)

WITHOUT_A_GROUP = {"gae", "reinforce_plus_plus"}
UNAVAILABLE = {"gdpo", "optimal_token_baseline", "remax", "tir_optimal_token_baseline"}
"""They need what a batch of the V1 trainer does not have."""


def test_every_estimator_of_verl_with_a_baseline_of_the_group_is_known() -> None:
    assert GROUP_ESTIMATORS | WITHOUT_A_GROUP | UNAVAILABLE == VERLS
    assert GROUP_ESTIMATORS >= MINI_BATCH_ESTIMATORS


@pytest.mark.parametrize("estimator", sorted(GROUP_ESTIMATORS | WITHOUT_A_GROUP))
def test_the_baseline_of_an_estimator_is_that_of_the_group(estimator: str) -> None:
    """The scores of a group all rise by the same: only the advantage without a baseline of the group changes."""
    before = advantages(*batch(), estimator)
    data, keys = batch()
    group = data.non_tensor_batch["uid"] == "u1"
    data.batch["token_level_rewards"][group, 0] += 1.0
    # Whitening and counting scale the whole batch.
    after = advantages(data, keys, estimator)
    ratio = (before[group] * after[group]).sum() / (before[group].norm() * after[group].norm())
    assert (ratio > 0.999) == (estimator in GROUP_ESTIMATORS)
