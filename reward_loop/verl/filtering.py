"""verl's filter of groups (DAPO), where a sample has no score and so not the number that verl filters by."""

from __future__ import annotations

from typing import Any

import transfer_queue as tq

from reward_loop.types import Outcome

__all__ = ["keep_groups_without_metric"]


def keep_groups_without_metric(buffer: Any) -> None:
    """Has a replay buffer of verl keep the groups of which a sample failed or was unscored and lacks the metric.

    verl would end the run: it knows a sample without a reward only as a rollout that failed, whose group it does not
    filter. A sample with a score must have the metric, as in verl.
    """
    metric = getattr(buffer, "filter_groups_metric", None)
    if metric is None or metric == "reward":
        return
    filter_groups = buffer._dapo_filtered_keys

    def filter_others(partition_id: str) -> Any:
        kept = buffer._dapo_classification_cache[partition_id]
        new = buffer.finished_keys[partition_id] - kept.keys()
        keys = [key for key in buffer.partitions[partition_id] if key.split("_")[0] in new]
        if keys and partition_id != "val":
            data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["extra_fields"])
            for key, extra in zip(keys, data["extra_fields"], strict=True):
                info = getattr(extra, "data", extra).get("reward_extra_info") or {}
                if metric not in info and info.get("reward_outcome") in (Outcome.FAILED, Outcome.UNSCORED):
                    kept[key.split("_")[0]] = None
        return filter_groups(partition_id)

    buffer._dapo_filtered_keys = filter_others
