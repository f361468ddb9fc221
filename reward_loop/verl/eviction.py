"""The eviction of groups in the mode ``reward_pipeline``: those that verl's replay buffer would evict."""

from __future__ import annotations

from omegaconf import DictConfig
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, _accumulate_eviction_metrics

from reward_loop.errors import RewardLoopError
from reward_loop.verl.mode_options import PIPELINE_MODE, PipelineOptions
from reward_loop.verl.progress import RefillLimit

__all__ = ["Eviction"]


class Eviction:
    """Evicts groups during one training step, and bounds how often they are replaced.

    Args:
        buffer: verl's replay buffer, which decides which groups are evicted.
        config: verl's whole configuration.
        options: the options of the mode.
        step: the training step.
    """

    def __init__(self, buffer: ReplayBuffer, config: DictConfig, options: PipelineOptions, step: int) -> None:
        self._buffer = buffer
        self._config = config
        self._max_refills = options.max_refills
        self._step = step
        self._refills = RefillLimit(options.max_refills)

    def run(self, metrics: dict) -> tuple[set[str], int]:
        """Evicts groups that are filtered, or failed without a trajectory.

        Args:
            metrics: verl's metrics of evictions are added.

        Returns:
            The uids of the evicted groups, and the number of failed groups among them.
        """
        self._buffer._sync_metadata_from_transfer_queue()
        reasons = self._buffer._terminal_eviction_reasons(self._step, "train")
        evicted, stale, _, eviction_metrics = self._buffer._evict_terminal_groups(self._step, "train", reasons)
        _accumulate_eviction_metrics(metrics, eviction_metrics, stale)
        return evicted, len(reasons[2])

    def check(self, *, evicted: int, failed: int, kept: int, failure: str) -> None:
        """Records one round of evictions, before the groups are replaced.

        Args:
            evicted: the number of evicted groups.
            failed: the number of failed groups among them.
            kept: the number of groups that remain.
            failure: the latest rollout that failed, for the message.

        Raises:
            RewardLoopError: groups failed and their replacements failed too, more than ``max_refills`` times in a row;
                or replacing the filtered groups would exceed ``algorithm.filter_groups.max_num_gen_batches``.
        """
        if self._refills.exhausted(failed=failed, filtered=evicted - failed, kept=kept):
            raise RewardLoopError(
                f"{failed} groups failed, and their replacements failed too, {self._max_refills} times in a row "
                f"(trainer.v1.{PIPELINE_MODE}.max_refills={self._max_refills}). {failure}"
            )
        if evicted and self._refills.filtered:
            self._check_filtered(self._refills.filtered)

    def _check_filtered(self, filtered: int) -> None:
        options, size = self._config.algorithm.filter_groups, self._config.data.train_batch_size
        most = options.get("max_num_gen_batches", 0)
        if most > 0 and size + filtered > most * size:
            raise RewardLoopError(
                f"algorithm.filter_groups has filtered out {filtered} groups in step {self._step}, because their "
                f"rollouts have the same {options.metric}. To replace them, more batches of {size} would have to be "
                f"generated than algorithm.filter_groups.max_num_gen_batches={most} allows. Are the prompts too easy "
                "or too hard, or does the reward function give every sample the same score? 0 means no limit"
            )
