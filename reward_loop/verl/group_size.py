"""The column ``group_size``: the number of rollouts of each prompt. Reward managers that score whole groups need it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["WithGroupSize", "group_sizes"]


class WithGroupSize:
    """verl's data loader, with the column ``group_size``. ``n`` is as in `group_sizes`."""

    def __init__(self, loader: Any, n: int) -> None:
        self._loader = loader
        self._n = n

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._loader:
            yield {**batch, "group_size": np.array(group_sizes(batch, self._n), dtype=object)}

    def __len__(self) -> int:
        return len(self._loader)


def group_sizes(batch: Any, n: int) -> list[int]:
    """Return the number of rollouts of each row: verl's column ``__rollout_n__`` if it exists, else ``n``."""
    sizes = batch.get("__rollout_n__", None)
    return [n] * len(batch["raw_prompt"]) if sizes is None else [int(size) for size in sizes]
