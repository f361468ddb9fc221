"""Reads batches ahead, so that each batch is linked to the batch of the next generation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

__all__ = ["GenerationBatch", "Lookahead"]


class GenerationBatch(list[Any]):
    """A batch of prompts. TRL's loader yields it once for each update in which its completions are used."""

    following: GenerationBatch | None = None
    """The batch for which completions are generated next; ``None`` at the end of an epoch or of the training."""
    step: int = 0
    """The number of finished optimizer steps when the batch is trained on."""


class Lookahead:
    """Reads the batches of one epoch from its iterator."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._read: deque[GenerationBatch] = deque()

    def take(self, count: int, every: int, *, step: int, last_step: int, accumulation: int) -> list[GenerationBatch]:
        """Return the batches of one optimizer step; fewer at the end of the epoch.

        Args:
            count: the number of batches.
            every: generation happens once for this many batches.
            step: the number of finished optimizer steps.
            last_step: the number of optimizer steps of the training.
            accumulation: the number of batches of an optimizer step.
        """
        while len(self._read) < count + every:
            try:
                self._read.append(GenerationBatch(next(self.source)))
            except StopIteration:
                break
        known = list(self._read)
        batches = [self._read.popleft() for _ in range(min(count, len(known)))]
        needed = len(batches) + max(0, last_step - step - 1) * accumulation
        for index, batch in enumerate(batches):
            batch.step = step
            after = index + every
            batch.following = known[after] if after < min(len(known), needed) else None
            if batch.following is not None:
                batch.following.step = step + after // accumulation
        return batches
