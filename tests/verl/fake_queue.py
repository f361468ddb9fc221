"""TransferQueue as dicts of tags and of rows."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta

THREE_TOKENS = torch.ones(3, dtype=torch.long)


class FakeQueue:
    """Stands where the module ``transfer_queue`` is. Keys are unique over the partitions."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, dict[str, Any]]] = {"train": {}, "val": {}}
        self.rows: dict[str, dict[str, Any]] = {}
        self.fetched: list[set[str]] = []

    def put(self, key: str, score: float, info: dict[str, Any], mask: torch.Tensor = THREE_TOKENS) -> None:
        """Add a trajectory with a reward at its last token, without tags."""
        scores = torch.zeros(len(mask))
        scores[-1] = score
        self.rows[key] = {
            "responses": torch.ones_like(mask),
            "response_mask": mask,
            "loss_mask": mask,
            "rm_scores": scores,
            "extra_fields": {"reward_extra_info": info},
        }

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict]]:
        return {name: dict(items) for name, items in self.tags.items() if partition_id in (None, name)}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            del self.tags[partition_id][key]
            self.rows.pop(key, None)

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> Any:
        fields = list(self.rows[keys[0]]) if select_fields is None else select_fields
        self.fetched.append(set(fields))
        columns: dict[str, Any] = {}
        for field in fields:
            if any(field not in self.rows[key] for key in keys):
                continue  # as TransferQueue, which returns the fields that all rows have
            values = [self.rows[key][field] for key in keys]
            tensors = isinstance(values[0], torch.Tensor)
            columns[field] = (
                torch.nested.as_nested_tensor(values, layout=torch.jagged) if tensors else NonTensorStack(*values)
            )
        return TensorDict(columns, batch_size=len(keys))

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any = None, tags: Any = None) -> KVBatchMeta:
        for field in () if fields is None else fields.keys():
            values = fields[field].unbind() if isinstance(fields.get(field), torch.Tensor) else list(fields[field])
            for key, value in zip(keys, values, strict=True):
                self.rows.setdefault(key, {})[field] = (
                    getattr(value, "data", value) if field == "extra_fields" else value
                )
        for key, tag in zip(keys, tags or (), strict=False):
            self.tags[partition_id][key] = self.tags[partition_id].get(key, {}) | tag
        names = list(self.rows.get(keys[0], ()))
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags or [{} for _ in keys], fields=names)
