"""Change rewards after ``run_single``: the user's ``post_process_scores``, and samples that fail only then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from reward_loop.errors import ScoringError
from reward_loop.limits.local import FailureBound
from reward_loop.managers.base import open_records
from reward_loop.managers.failures import decide
from reward_loop.managers.options import RewardLoopConfig
from reward_loop.records import reward_change_row
from reward_loop.scoring import ScoringFunction
from reward_loop.types import Outcome, Reward, RewardResult, RewardSample


class PostProcess:
    """Applies a class's ``post_process_scores`` to groups in which every sample has a reward."""

    def __init__(self, function: ScoringFunction, options: RewardLoopConfig) -> None:
        self._function = function
        self._options = options
        # Not the manager's: `run_single` has counted these samples there already.
        self._failures = FailureBound.of_options(options)

    @classmethod
    def of(cls, manager: Any) -> Self | None:
        """Return the post-processing of a manager's function; ``None`` if the function has none."""
        function = getattr(manager, "function", None)
        if not isinstance(function, ScoringFunction) or not function.has_post_process:
            return None
        return cls(function, getattr(manager, "options", None) or RewardLoopConfig())

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
        results = [RewardResult.of(reward) for reward in rewards]
        scored = {i: result.score for i, result in enumerate(results) if result.score is not None}
        if not scored:
            return processed
        try:
            scores = await self._function.post_process_scores(list(scored.values()))
        except ScoringError as error:
            for i in scored:
                failure = error.about(RewardSample("", uid=names[i]))
                failure.__cause__ = error
                processed[i] = fail_reward(rewards[i], failure, self._failures, self._options)
        else:
            for i, score in zip(scored, scores, strict=True):
                self._failures.count(results[i])
                if score != scored[i]:
                    sample = RewardSample("", uid=names[i])
                    _record_change(self._options, sample, self._function.name, reward=score)
                processed[i] = {**rewards[i], "reward_score": score}
        return processed


def fail_reward(reward: Reward, failure: ScoringError, failures: FailureBound, options: RewardLoopConfig) -> Reward:
    """Return the reward of a failed sample, for a sample that failed after its function had returned.

    The sample's record gets a revision, whose outcome is *failed*.

    Args:
        reward: the reward that ``run_single`` returned.
        failure: the error, which names the sample.
        failures: the failure bound, which counts the sample.
        options: the policies.

    Raises:
        ScoringError: the policy is ``raise``.
        TooManyFailuresError: the share of failed samples among the recent samples is too large.
    """
    before = RewardResult.of(reward)
    result = replace(before, outcome=Outcome.FAILED, score=None, error=str(failure), exception=failure)
    result = decide(result, options, before.total_s)
    sample = RewardSample("", uid=failure.sample_uid, data_source=failure.data_source)
    changes = {"outcome": result.outcome, "error": result.error, "cause": result.cause, "masked": result.masked}
    _record_change(options, sample, failure.function or "", reward=result.reward, **changes)
    failures.count(result)
    return result.to_reward()


def _record_change(options: RewardLoopConfig, sample: RewardSample, function: str, **changes: Any) -> None:
    """Record that the reward of a recorded sample has changed; see `reward_change_row` for the arguments."""
    if (writer := open_records(options)) is not None:
        writer.write(reward_change_row(sample, function, **changes))
