"""What a caller hands in stays as it is, and keys may differ from sample to sample, whichever manager it is."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest

from reward_loop.managers import get
from reward_loop.types import RESERVED_KEYS
from tests.managers.letters import Tokenizer, batch

CONFIG: dict[str, Any] = {
    "reward": {"num_workers": 1},
    "trainer": {"experiment_name": "e1"},
    "reward_loop": {"group": {"size": 3}, "batch": {"max_batch_size": 3}},
}

INFO = {"level": 1, "tags": ["x"], "nested": {"deep": {1, 2}}, "array": np.zeros(2)}


def meddles(extra_info: dict[str, Any]) -> None:
    extra_info["level"] = 99
    extra_info["tags"].append("y")
    extra_info["nested"]["deep"].add(3)
    extra_info["array"] += 1
    del extra_info["num_turns"]


def one(solution_str: str, extra_info: dict[str, Any]) -> dict[str, Any] | None:
    meddles(extra_info)
    return {"a": {"score": 1, "alone": 1}, "b": {"score": 2, "other": 2}, "c": None}[solution_str]


def lists(solution_strs: list[str], extra_infos: list[dict[str, Any]]) -> list[Any]:
    return [one(text, info) for text, info in zip(solution_strs, extra_infos, strict=True)]


@pytest.mark.parametrize("name", ["naive", "dapo", "batch", "group"])
async def test_the_callers_extra_info_is_unchanged_and_keys_may_differ(name: str) -> None:
    cls = get(name)
    manager = cls(CONFIG, Tokenizer(), lists if name in ("batch", "group") else one)
    rows = [
        batch([[number]], [[1, 1]], extra_info=[copy.deepcopy(INFO)], tool_extra_fields=[{"calls": 1}], uid=["u"])
        for number in (1, 2, 3)
    ]
    rewards = await asyncio.gather(*(manager.run_single(row) for row in rows))
    for row in rows:
        info = row.non_tensor_batch["extra_info"][0]
        assert info.keys() == INFO.keys()
        assert (info["level"], info["tags"], info["nested"]) == (1, ["x"], {"deep": {1, 2}})
        assert info["array"].tolist() == [0, 0]
        assert row.non_tensor_batch["tool_extra_fields"][0] == {"calls": 1}
    infos = [reward["reward_extra_info"] for reward in rewards]
    assert [info["reward_outcome"] for info in infos] == ["scored", "scored", "unscored"]
    assert all(info.keys() >= RESERVED_KEYS for info in infos)
    assert ["alone" in info for info in infos] == [True, False, False]
    assert ["other" in info for info in infos] == [False, True, False]
