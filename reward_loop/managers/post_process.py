"""Apply the user's ``post_process_scores`` to the scores of a complete group."""

from __future__ import annotations

from collections.abc import Sequence

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ScoringError
from reward_loop.limits.failures import FailureBound
from reward_loop.managers.policy import fail_reward
from reward_loop.managers.recording import record_reward_change
from reward_loop.scoring import ScoringFunction
from reward_loop.types import Outcome, Reward, RewardResult, RewardSample

__all__ = ["PostProcess", "is_scored"]


class PostProcess:
    """Applies a class's ``post_process_scores`` to groups in which every sample has a reward.

    Args:
        function: the scoring function of the class.
        options: the policies and the failure bound.
    """

    def __init__(self, function: ScoringFunction, options: RewardLoopConfig) -> None:
        self._function = function
        self._options = options
        self._failures = FailureBound.of_options(options)

    async def __call__(self, rewards: Sequence[Reward], names: Sequence[str | None]) -> list[Reward]:
        """Return the rewards of a group, with post-processed scores for its scored samples.

        Unscored and failed samples stay unchanged. If no sample was scored, the user's method is not called. If the
        method fails, all scored samples fail.

        Args:
            rewards: the rewards of all samples in the group.
            names: the names of the samples in the same order, for messages.

        Raises:
            ScoringError: the method failed, and the policy is ``raise``.
            TooManyFailuresError: the share of samples that failed in this way among the recent samples is too large.
        """
        processed = list(rewards)
        scored = [i for i, reward in enumerate(rewards) if is_scored(reward)]
        if not scored:
            return processed
        try:
            scores = await self._function.post_process_scores([rewards[i]["reward_score"] for i in scored])
        except ScoringError as error:
            for i in scored:
                processed[i] = self._failed(rewards[i], names[i], error)
        else:
            for i, score in zip(scored, scores, strict=True):
                self._failures.count(RewardResult(Outcome.SCORED, score))
                if score != rewards[i]["reward_score"]:
                    sample = RewardSample("", uid=names[i])
                    record_reward_change(self._options, sample, self._function.name, reward=score)
                processed[i] = {**rewards[i], "reward_score": score}
        return processed

    def _failed(self, reward: Reward, name: str | None, error: ScoringError) -> Reward:
        failure = error.about(RewardSample("", uid=name))
        failure.__cause__ = error
        return fail_reward(reward, failure, self._failures, self._options)


def is_scored(reward: Reward) -> bool:
    """Whether the sample was scored; a reward without ``reward_outcome`` counts as scored."""
    info = reward.get("reward_extra_info") or {}
    return info.get("reward_outcome", Outcome.SCORED) == Outcome.SCORED
