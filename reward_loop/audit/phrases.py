"""Phrases that become more frequent over steps and go together with a higher reward; found without a model.

A phrase is an n-gram of token IDs. Many n-grams are compared, so two independent tests must agree:

- The share of responses with the n-gram rises over a window of steps, by more than the noise of the steps.
- Within groups, responses with the n-gram have higher rewards. The part of the rewards that lengths and a reference
  explain is removed before. The level of the test is divided by the number of n-grams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from reward_loop.audit.reference import MOST_SAMPLES, rises
from reward_loop.audit.values import Observation

SIZES = (1, 2, 4)
"""The numbers of tokens of the n-grams."""

END_TOKENS = 128
"""Only this number of tokens at the start and at the end of a response is compared: in a longer response, more n-grams
would occur by chance."""

START, END = -1, -2
"""The token IDs that stand for the start and the end of a response: an answer of one word is a phrase, too."""

MIN_SHARE = 0.02
"""The smallest share of the responses of a step with which an n-gram is stored."""

LEVEL = 1e-4
"""The probability that chance relates one of the n-grams to the reward in a step."""

RISE_ERRORS = 4.0
"""A share rises if its rise is larger than this number of its standard errors."""

MOST_TOKENS = 32
"""The largest number of tokens of a phrase in a warning."""

_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64)
"""Odd constants, whose products wrap around."""

HASH_BITS = 44
"""The upper bits of the sums: equal ones of different n-grams are too rare to matter. The other 20 bits of an integer
hold the number of a response."""


class Phrase(NamedTuple):
    """A phrase of a step, around the n-gram with the largest rise."""

    tokens: list[int]
    share: float
    """The share of the responses of the step that contain the n-gram."""
    rise: float
    """How far this share rose over the window."""
    effect: float
    """How much higher the rewards of the responses with it are, within groups, in standard deviations."""
    uids: list[str]
    """Samples that contain it, with the highest rewards, one of a group."""


class _Counts(NamedTuple):
    """The n-grams of a step, sorted by their hashes."""

    hashes: np.ndarray
    values: np.ndarray
    """For each n-gram, the share of the responses that contain it; the sum of their rewards; the variance of this sum
    if chance chose the responses within each group; and the number by which an effect of 1 changes the sum."""

    def of(self, hashes: np.ndarray) -> np.ndarray:
        """Return the values of these n-grams; 0 for those that are not stored."""
        if not len(self.hashes):
            return np.zeros((len(hashes), 4))
        at = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.where((self.hashes[at] == hashes)[:, None], self.values[at], 0.0)


class PhraseHistory:
    """The n-grams of the latest steps.

    Args:
        window: the number of steps over which a share must rise.
        threshold: the smallest rise.
    """

    def __init__(self, window: int, threshold: float) -> None:
        self._steps: deque[_Counts] = deque(maxlen=window)
        self._threshold = threshold
        self._cleared = np.zeros(0, dtype=np.uint64)
        """The hashes of n-grams that are not reported."""

    def clear(self, tokens: Sequence[int]) -> None:
        """Report no n-gram of a phrase any more."""
        # All n-grams of it: otherwise, the next step would report the same phrase by another one.
        self._cleared = np.unique(np.concatenate([self._cleared, *_Texts([np.array(tokens)]).hashes]))

    def add(self, step: Observation, rewards: np.ndarray) -> Phrase | None:
        """Add a step, and return its phrase; ``None`` if no n-gram passes both tests.

        Args:
            step: the step, with responses.
            rewards: the rewards of these responses, see `unexplained_rewards`.
        """
        texts = _Texts(step.responses)
        groups = step.groups[step.response_samples]
        latest = _count(texts, rewards, groups)
        self._steps.append(latest)
        hashes = latest.hashes[latest.values[:, 0] >= self._threshold]
        hashes = hashes[~np.isin(hashes, self._cleared)]
        if not len(hashes) or len(self._steps) < (self._steps.maxlen or 0):
            return None
        values = np.stack([past.of(hashes) for past in self._steps])
        risen, errors = rises(values[:, :, 0])
        _, sums, variances, weights = values.sum(axis=0).T
        quantile = NormalDist().inv_cdf(1 - LEVEL / len(hashes))
        found = (risen > RISE_ERRORS * errors) & (sums > quantile * np.sqrt(variances)) & (variances > 0)
        if not found.any():
            return None
        best = int(np.argmax(np.where(found, risen, -np.inf)))
        having = texts.having(hashes[best])
        order = step.response_samples[having[np.argsort(-rewards[having], kind="stable")]]
        _, first = np.unique(step.groups[order], return_index=True)
        return Phrase(
            tokens=texts.phrase(hashes[best], hashes[found]),
            share=float(latest.of(hashes[[best]])[0, 0]),
            rise=float(risen[best]),
            effect=float(sums[best] / weights[best]),
            uids=[step.uids[order[index]] for index in np.sort(first)[:MOST_SAMPLES]] if step.uids else [],
        )


def unexplained_rewards(step: Observation, reference: str | None) -> np.ndarray:
    """Return the part of the rewards of the responses that neither lengths nor the reference explain.

    Rewards, lengths and references are differences from the mean of the group; what a least squares fit explains is
    removed. The result has a mean of 0 in each group and a standard deviation of 1; it is NaN for masked samples.
    """
    samples = step.response_samples
    columns = [step.rewards[samples], step.lengths[samples].astype(float)]
    if reference is not None and reference in step.components:
        columns.append(step.components[reference][samples])
    values = np.stack(columns, axis=1)
    kept = np.isfinite(values).all(axis=1)
    _, groups = np.unique(step.groups[samples][kept], return_inverse=True)
    sizes = np.bincount(groups)
    means = np.stack([np.bincount(groups, column) / sizes for column in values[kept].T], axis=1)
    reward, *others = (values[kept] - means[groups]).T
    causes = np.stack(others, axis=1)
    weights, *_ = np.linalg.lstsq(causes, reward, rcond=1e-9)
    left = reward - causes @ weights
    found = np.full(len(samples), np.nan)
    deviation = left.std() if len(left) else 0.0
    found[kept] = left / deviation if deviation > 1e-9 else 0.0
    return found


class _Texts:
    """The starts and ends of responses, as one array of tokens."""

    def __init__(self, responses: Sequence[np.ndarray]) -> None:
        pieces: list[np.ndarray] = []
        for tokens in responses:
            middle = min(END_TOKENS, (len(tokens) + 1) // 2)
            pieces += [np.append(START, tokens[:middle]), np.append(tokens[middle:][-END_TOKENS:], END)]
        lengths = np.array([len(piece) for piece in pieces])
        self.size = len(responses)
        self.tokens = np.concatenate(pieces)
        self.response = np.repeat(np.arange(len(pieces)) // 2, lengths)
        # Where the middle of a response is left out, no n-gram joins both sides.
        is_cut = np.array([len(tokens) > 2 * END_TOKENS for tokens in responses])
        piece = np.repeat(np.arange(len(pieces)), lengths)
        self.text = np.where(is_cut[self.response], piece, 2 * self.response)
        ids = (self.tokens - END + 1).astype(np.uint64)
        self.places: list[np.ndarray] = []
        """For each size, the positions where an n-gram starts."""
        self.hashes: list[np.ndarray] = []
        """For each size, the hashes of these n-grams."""
        for size in SIZES:
            starts = np.arange(len(ids) - size + 1)
            starts = starts[self.text[starts] == self.text[starts + size - 1]]
            hashes = np.full(len(starts), size, dtype=np.uint64)
            for place, factor in enumerate(_FACTORS[:size]):
                hashes += ids[starts + place] * factor
            self.places.append(starts)
            self.hashes.append(hashes >> np.uint64(64 - HASH_BITS))

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return each n-gram of each response once: its hash and its response, sorted."""
        bits = np.uint64(64 - HASH_BITS)
        responses = self.response[np.concatenate(self.places)].astype(np.uint64)
        both = np.concatenate(self.hashes) << bits | responses  # one sort of both is much faster than `np.lexsort`
        both.sort()
        both = both[np.append(True, both[1:] != both[:-1])]
        return both >> bits, (both & (np.uint64(1) << bits) - np.uint64(1)).astype(int)

    def having(self, ngram: np.uint64) -> np.ndarray:
        """Return the numbers of the responses with this n-gram."""
        places = [places[hashes == ngram] for places, hashes in zip(self.places, self.hashes, strict=True)]
        return np.unique(self.response[np.concatenate(places)])

    def phrase(self, ngram: np.uint64, others: np.ndarray) -> list[int]:
        """Return the longest run of tokens around the first occurrence of an n-gram that belong to one of `others`."""
        covered = np.zeros(len(self.tokens), dtype=bool)
        place = 0
        for size, places, hashes in zip(SIZES, self.places, self.hashes, strict=True):
            starts = places[np.isin(hashes, others)]
            covered[(starts[:, None] + np.arange(size)).ravel()] = True
            place = int(starts_of[0]) if len(starts_of := places[hashes == ngram]) else place
        covered &= self.text == self.text[place]
        gaps = np.flatnonzero(~covered)
        after = np.searchsorted(gaps, place)
        first = int(gaps[after - 1]) + 1 if after else 0
        last = int(gaps[after]) if after < len(gaps) else len(covered)
        run = self.tokens[max(first, place - MOST_TOKENS // 2) : last][:MOST_TOKENS]
        return [int(token) for token in run if token >= 0]


def _count(texts: _Texts, rewards: np.ndarray, groups: np.ndarray) -> _Counts:
    """Count the n-grams of a step that occur in at least `MIN_SHARE` of the responses."""
    hashes, responses = texts.pairs()
    starts = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1]))
    counts = np.diff(np.append(starts, len(hashes)))
    index = np.repeat(np.arange(len(starts)), counts)
    is_kept = counts >= max(2.0, MIN_SHARE * texts.size)
    number = np.cumsum(is_kept) - 1
    is_used = is_kept[index] & np.isfinite(rewards[responses])
    index, responses = number[index[is_used]], responses[is_used]
    size = int(is_kept.sum())
    sums = np.bincount(index, rewards[responses], minlength=size)
    # Samples of a group with the n-gram, drawn without replacement from those of the group.
    trained = np.isfinite(rewards)
    _, group = np.unique(groups, return_inverse=True)
    sizes = np.bincount(group[trained], minlength=len(groups))
    spreads = np.bincount(group[trained], rewards[trained] ** 2, minlength=len(groups)) / np.maximum(sizes - 1, 1)
    cells, having = np.unique(index * len(groups) + group[responses], return_counts=True)
    ngram, cell = np.divmod(cells, max(len(groups), 1))
    weights = having * (sizes[cell] - having) / sizes[cell]
    totals = (np.bincount(ngram, values, minlength=size) for values in (weights * spreads[cell], weights))
    return _Counts(hashes[starts[is_kept]], np.stack([counts[is_kept] / texts.size, sums, *totals], axis=1))
