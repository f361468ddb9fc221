"""Managers that were written for verl, run by a reward worker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reward_loop.config import RewardLoopConfig
from reward_loop.limits import LocalLimits
from reward_loop.records import records
from reward_loop.records.reader import RecordsReader
from reward_loop.verl.workers.managers import VerlManager

pytestmark = pytest.mark.integration  # imports verl


async def test_samples_of_a_manager_of_verl_are_recorded(tmp_path: Path) -> None:
    class LengthManager:
        async def run_single(self, data: Any) -> dict[str, Any]:
            return {"reward_score": 0.5, "reward_extra_info": {"length": 3}}

    options = RewardLoopConfig(log_dir=str(tmp_path))
    limits = LocalLimits(options)
    row = {"uid": np.array(["q"]), "session_id": np.array([2]), "data_source": np.array(["math"])}
    data = SimpleNamespace(batch={"responses": np.ones((1, 3))}, non_tensor_batch=row)
    reward = await VerlManager(LengthManager(), options, limits).run_single(data)
    limits.close()
    assert reward["reward_score"] == 0.5
    assert records(tmp_path).flush()
    (recorded,) = RecordsReader(tmp_path).rows()
    assert (recorded["uid"], recorded["score"], recorded["components"]) == ("q_2", 0.5, {"length": 3})
