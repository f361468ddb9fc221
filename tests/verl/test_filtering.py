"""verl's own replay buffer, where samples have no score. TransferQueue is a dict here."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from reward_loop.verl import filtering
from reward_loop.verl.filtering import keep_groups_without_metric

pytestmark = pytest.mark.integration  # imports verl


def buffer(monkeypatch: pytest.MonkeyPatch, infos: dict[str, dict[str, Any]], metric: str | None = "acc") -> Any:
    def get(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, list[Any]]:
        assert select_fields == ["extra_fields"]
        return {"extra_fields": [{"reward_extra_info": infos[key]} for key in keys]}

    for module in (replay_buffer, filtering):
        monkeypatch.setattr(module, "tq", SimpleNamespace(kv_batch_get=get))
    buffer = ReplayBuffer(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="wait",
        sampler_kwargs={},
        refill_fn=lambda count: None,
        filter_groups_metric=metric,
    )
    for key in infos:
        buffer.partitions["train"][key] = {}
        buffer.finished_keys["train"].add(key.split("_")[0])
    return buffer


INFOS: dict[str, dict[str, Any]] = {
    **{f"alike_{i}_0": {"acc": 1.0, "reward_outcome": "scored"} for i in range(3)},
    **{f"mixed_{i}_0": {"acc": float(i), "reward_outcome": "scored"} for i in range(3)},
    **{f"failed_{i}_0": {"acc": 1.0, "reward_outcome": "scored"} for i in range(2)},
    "failed_2_0": {"reward_outcome": "failed", "reward_masked": True},
    "unscored_0_0": {"reward_outcome": "unscored"},
    "unscored_1_0": {"reward_outcome": "unscored"},
    # It has the number, though no score.
    **{f"known_{i}_0": {"acc": 0.0, "reward_outcome": "unscored"} for i in range(2)},
}


def test_a_group_with_a_sample_that_has_no_score_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    verls = buffer(monkeypatch, INFOS)
    with pytest.raises(RuntimeError, match="missing DAPO metric 'acc'"):
        verls._dapo_filtered_keys("train")
    ours = buffer(monkeypatch, INFOS)
    keep_groups_without_metric(ours)
    for _ in range(2):
        assert ours._dapo_filtered_keys("train") == ({"alike", "known"}, Counter({1.0: 1, 0.0: 1}))
    assert ours._dapo_filtered_keys("val") == (set(), Counter())


def test_a_score_without_the_metric_ends_the_run_as_in_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = buffer(monkeypatch, {"a_0_0": {"reward_outcome": "scored"}, "a_1_0": {"acc": 1.0}})
    keep_groups_without_metric(ours)
    with pytest.raises(RuntimeError, match="missing DAPO metric 'acc'"):
        ours._dapo_filtered_keys("train")


@pytest.mark.parametrize("metric", [None, "reward"])
def test_what_needs_no_metric_is_left_alone(monkeypatch: pytest.MonkeyPatch, metric: str | None) -> None:
    ours = buffer(monkeypatch, {}, metric)
    before = ours._dapo_filtered_keys
    keep_groups_without_metric(ours)
    assert ours._dapo_filtered_keys == before
