"""Bounds on the replacement of failed and filtered groups. verl replaces them indefinitely. Does not import verl."""

from __future__ import annotations

from collections.abc import Iterable

from omegaconf import DictConfig

from reward_loop.errors import RewardLoopError
from reward_loop.verl.mode_options import PIPELINE_MODE

__all__ = ["FailureStreak", "RefillLimit"]


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
        if self._successful - before:
            self.in_a_row = 0
        self.in_a_row += failed
        return self._bound is not None and self.in_a_row > self._bound
