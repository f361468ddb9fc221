"""Helpers for the rows of a batch in TransferQueue: read tags and extra fields, select rows, write zeros."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from reward_loop.verl.trajectory_keys import uid_of

__all__ = ["MASKS", "copy", "extra_fields_of", "read_tags", "read_trajectories", "select", "unfinished_prompts", "zero"]

MASKS = ("response_mask", "loss_mask")
"""The fields that mark which tokens of a response are trained on."""


def copy(batch: KVBatchMeta) -> KVBatchMeta:
    """Returns a copy of the batch metadata.

    verl changes the ``extra_info`` of its argument, and caches field names that only some rows have.
    """
    return select(batch, range(len(batch.keys)))


def select(batch: KVBatchMeta, positions: Sequence[int]) -> KVBatchMeta:
    """Returns the rows at these positions of a batch, in this order."""
    return KVBatchMeta(
        partition_id=batch.partition_id,
        keys=[batch.keys[i] for i in positions],
        tags=[batch.tags[i] for i in positions],
        extra_info=dict(batch.extra_info or {}),
    )


def read_tags() -> tuple[dict[str, dict], dict[str, dict]]:
    """Returns the tags of the training prompts, and the tags of their trajectories, that are in TransferQueue."""
    items = (tq.kv_list("train") or {}).get("train", {})
    prompts = {key: tag for key, tag in items.items() if tag.get("is_prompt")}
    return prompts, {key: tag for key, tag in items.items() if key not in prompts}


def read_trajectories(uids: Collection[str], partition_id: str = "train") -> KVBatchMeta:
    """Returns the trajectories of these prompts that are in TransferQueue."""
    items = (tq.kv_list(partition_id) or {}).get(partition_id, {})
    rows = {key: tag for key, tag in items.items() if not tag.get("is_prompt") and uid_of(key) in uids}
    return KVBatchMeta(partition_id=partition_id, keys=list(rows), tags=list(rows.values()))


def unfinished_prompts() -> dict[str, tuple[str, dict]]:
    """Returns the partition and the tags of each prompt that lacks a rollout or a reward, by uid."""
    return {
        key: (partition, tag)
        for partition, items in (tq.kv_list() or {}).items()
        for key, tag in items.items()
        if tag.get("is_prompt") and tag["status"] in ("pending", "running")
    }


def extra_fields_of(rows: TensorDict) -> list[dict[str, Any]]:
    """Returns the column ``extra_fields`` of rows from TransferQueue, which may wrap each entry."""
    return [getattr(extra, "data", extra) for extra in rows["extra_fields"]]


def zero(keys: Sequence[str], *fields: str, partition_id: str = "train") -> None:
    """Writes zeros to fields of some rows, one for each token of the response."""
    if not keys:
        return
    keys = list(keys)
    data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["response_mask"])
    masks = data["response_mask"].unbind()
    zeros = {
        field: torch.nested.as_nested_tensor(
            [mask.new_zeros(mask.shape, dtype=None if field in MASKS else torch.float32) for mask in masks],
            layout=torch.jagged,
        )
        for field in fields
    }
    tq.kv_batch_put(keys=keys, partition_id=partition_id, fields=TensorDict(zeros, batch_size=len(keys)))
