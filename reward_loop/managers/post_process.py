"""Scores of a whole group: the user's ``post_process_scores``, between the rewards of the members and their use."""

from __future__ import annotations

from collections.abc import Sequence

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ScoringError
from reward_loop.limits.failures import FailureBound
from reward_loop.managers.policy import fail_reward
from reward_loop.scoring import ScoringFunction
from reward_loop.types import Outcome, Reward, RewardResult, RewardSample

__all__ = ["PostProcess", "is_scored"]


class PostProcess:
    """Applies a class's ``post_process_scores`` to groups, whose members have all ended."""

    def __init__(self, function: ScoringFunction, options: RewardLoopConfig) -> None:
        self._function = function
        self._options = options
        self._failures = FailureBound.of_options(options)

    async def __call__(self, rewards: Sequence[Reward], names: Sequence[str | None]) -> list[Reward]:
        """Return the rewards of a group, with new scores for those of its members that were scored.

        The others stay as they are. If no member was scored, the user's method is not called.

        Args:
            rewards: of all members.
            names: of all members, for messages.

        Raises:
            ScoringError: the method failed, so that the scored members have, and the policy is ``raise``.
            TooManyFailuresError: too large a share of the latest samples failed so.
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
                processed[i] = {**rewards[i], "reward_score": score}
        return processed

    def _failed(self, reward: Reward, name: str | None, error: ScoringError) -> Reward:
        failure = error.about(RewardSample("", uid=name))
        failure.__cause__ = error
        return fail_reward(reward, failure, self._failures, self._options)


def is_scored(reward: Reward) -> bool:
    """Whether a reward has a score of its own; a manager that states no outcome has scored."""
    info = reward.get("reward_extra_info") or {}
    return info.get("reward_outcome", Outcome.SCORED) == Outcome.SCORED
