"""Monitors of the texts of responses, as token IDs: repetition within a response, identical responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

__all__ = ["identical_responses", "repeated_share", "repetition"]

NGRAM = 4

REPETITIVE = 0.5
"""A response is repetitive if more than this share of its 4-grams occurred earlier in it."""

MIN_TOKENS = 16
"""Shorter responses are left out: short answers to a question are often equal and correct."""

_FACTORS = np.array([1, 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)
"""Odd constants, whose products wrap around; equal sums of different 4-grams are too rare to matter."""


def repeated_share(tokens: np.ndarray) -> float:
    """Return the share of a response's 4-grams that occurred earlier in it (``seq-rep-4`` of Welleck et al.).

    Example::

        repeated_share(np.array([1, 2, 3, 4, 1, 2, 3, 4]))  # 0.2: one of five
    """
    count = len(tokens) - NGRAM + 1
    if count <= 0:
        return 0.0
    ids = np.asarray(tokens).astype(np.uint64)
    hashes = np.zeros(count, dtype=np.uint64)
    for place, factor in enumerate(_FACTORS):
        hashes += ids[place : place + count] * factor
    hashes.sort()  # faster here than `np.unique`
    different = 1 + int(np.count_nonzero(hashes[1:] != hashes[:-1]))
    return 1.0 - different / count


def repetition(responses: Sequence[np.ndarray]) -> float | None:
    """Return the share of repetitive responses; ``None`` if all are shorter than `MIN_TOKENS`."""
    long = [tokens for tokens in responses if len(tokens) >= MIN_TOKENS]
    if not long:
        return None
    return sum(repeated_share(tokens) > REPETITIVE for tokens in long) / len(long)


def identical_responses(responses: Sequence[np.ndarray]) -> float | None:
    """Return the share of responses that are equal to another one; ``None`` if all are shorter than `MIN_TOKENS`."""
    long = [np.ascontiguousarray(tokens).tobytes() for tokens in responses if len(tokens) >= MIN_TOKENS]
    if not long:
        return None
    copies = Counter(long)
    return sum(count for count in copies.values() if count > 1) / len(long)
