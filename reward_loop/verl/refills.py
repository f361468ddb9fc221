"""The replacement of failed and filtered groups: how many prompts to begin, and when to stop.

`FilterForecast` is pure arithmetic, without a clock; verl's trainer and the benchmark of the overlaps use it.
`RefillLimit` and `FailureStreak` are bounds: verl replaces groups indefinitely. Does not import verl.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from omegaconf import DictConfig

from reward_loop.errors import RewardLoopError
from reward_loop.verl.mode_options import PIPELINE_MODE


class RefillLimit:
    """Bounds the groups that are replaced in one training step of the mode ``reward_pipeline``.

    Args:
        config: verl's whole configuration.
        max_refills: how many times in a row all replacements of failed groups may fail too; ``None`` for no bound.
        step: the training step.
    """

    def __init__(self, config: DictConfig, max_refills: int | None, step: int) -> None:
        self._config = config
        self._max_refills = max_refills
        self._step = step
        self._kept = self._in_a_row = self._filtered = 0

    def check(self, *, failed: int, filtered: int, kept: int, failure: str) -> None:
        """Record one round of evictions, before the groups are replaced.

        Args:
            failed: the number of groups evicted now because they failed.
            filtered: the number of groups evicted now for another reason.
            kept: the number of groups that remain.
            failure: the latest rollout that failed, for the message.

        Raises:
            RewardLoopError: groups failed and their replacements failed too, more than ``max_refills`` times in a row;
                or too few groups remain, and replacing the filtered ones would exceed
                ``algorithm.filter_groups.max_num_gen_batches``.
        """
        # Groups that were filtered or kept have been judged: then rollouts do not all fail.
        again = failed > 0 and not filtered and kept <= self._kept
        self._in_a_row = self._in_a_row + 1 if again else 0
        self._kept = kept
        self._filtered += filtered
        if self._max_refills is not None and self._in_a_row > self._max_refills:
            raise RewardLoopError(
                f"{failed} groups failed, and their replacements failed too, {self._max_refills} times in a row "
                f"(trainer.v1.{PIPELINE_MODE}.max_refills={self._max_refills}). {failure}"
            )
        if self._filtered and kept < self._config.data.train_batch_size:
            self._check_filtered()

    def _check_filtered(self) -> None:
        options, size = self._config.algorithm.filter_groups, self._config.data.train_batch_size
        most = options.get("max_num_gen_batches", 0)
        if most > 0 and size + self._filtered > most * size:
            raise RewardLoopError(
                f"algorithm.filter_groups has filtered out {self._filtered} groups in step {self._step}, because their "
                f"rollouts have the same {options.metric}. To replace them, more batches of {size} would have to be "
                f"generated than algorithm.filter_groups.max_num_gen_batches={most} allows. Are the prompts too easy "
                "or too hard, or does the reward function give every sample the same score? 0 means no limit"
            )


class FailureStreak:
    """Counts the groups that failed in a row, for a trainer that always has groups in flight.

    Args:
        bound: how many groups may fail in a row; ``None`` for no bound.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._successful: frozenset[str] = frozenset()
        self.in_a_row = 0
        """The number of groups that failed since the last success."""

    def exhausted(self, failed: int, successful: Iterable[str]) -> bool:
        """Record failures and successes, and return whether too many groups failed in a row.

        Args:
            failed: the number of groups evicted now because they failed.
            successful: the uids of all successful groups that are still in the replay buffer.
        """
        before, self._successful = self._successful, frozenset(successful)
        # Only new ones: a group stays in the buffer until it is trained on.
        if self._successful - before:
            self.in_a_row = 0
        self.in_a_row += failed
        return self._bound is not None and self.in_a_row > self._bound


FADING = 0.75
"""The weight of a step's groups in the estimate, relative to those of the following step: about the last four count."""


class FilterForecast:
    """Estimates the share of groups that a filter removes, from the groups of the last steps.

    Args:
        most: the largest number of prompts that may be begun because the filter will probably remove others.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept = self._filtered = 0.0

    @property
    def share(self) -> float:
        """The estimated share of groups that the filter removes, below 1; 0 before the first group is removed."""
        # + 1, so that it is below 1: no number of prompts would be enough for a filter that removes all of them.
        return self._filtered / (self._kept + self._filtered + 1.0)

    def count(self, *, kept: int, filtered: int) -> None:
        """Record the filter's decisions on judged groups."""
        self._kept += kept
        self._filtered += filtered

    def end_step(self) -> None:
        """Reduce the weight of the groups so far."""
        self._kept *= FADING
        self._filtered *= FADING

    def missing(self, wanted: int, *, kept: int, pending: int, later: int = 0) -> int:
        """Return how many prompts to begin now.

        Without ``later``, it is 0 as long as the pending groups are expected to suffice; otherwise enough are begun for
        a margin of two standard deviations. With it, the step takes some of the next step's groups if it needs more,
        and the next step gets two standard deviations fewer than it needs: it can begin more, but what it does not
        need would become too old.

        Args:
            wanted: the number of groups that a step trains on.
            kept: the number of judged groups that have passed the filter.
            pending: the number of groups that are being generated or judged.
            later: the number of groups that the next step trains on, if its prompts are begun now.
        """
        short = max(0, wanted - kept)
        if later:
            for_later = self._prompts(max(0, later - max(0, kept - wanted)), deviations=-2)
            needed = self._prompts(short, deviations=0) + for_later - pending
        elif (1 - self.share) * pending >= short:
            needed = 0
        else:
            needed = self._prompts(short, deviations=2) - pending
        return max(0, min(needed, wanted + later + self._most - kept - pending))

    def _prompts(self, groups: int, *, deviations: float) -> int:
        """Return the number of prompts n of which ``groups`` pass the filter: n p - deviations sqrt(n f p) = groups.

        f is the share that it removes, and p = 1 - f. The number that passes is binomial.
        """
        share = self.share
        half = deviations * math.sqrt(share) / 2
        return math.ceil((half + math.sqrt(half**2 + groups)) ** 2 / (1 - share)) if share else groups
