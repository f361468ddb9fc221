"""The manager `gdpo`: several rewards per sample, each normalised separately by the trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reward_loop._util.text import listing, shorten
from reward_loop.errors import InvalidScoreError
from reward_loop.managers.base import RewardLoopManagerBase, verl_options
from reward_loop.managers.registry import register
from reward_loop.scoring.normalise import is_finite
from reward_loop.scoring.outcome import failed_after
from reward_loop.types import Reward, RewardResult, RewardSample, finite_number

__all__ = ["GDPORewardLoopManager"]


@register("gdpo")
class GDPORewardLoopManager(RewardLoopManagerBase):
    """Ensures that each sample has all rewards in ``algorithm.gdpo_reward_keys``, which GDPO normalises separately.

    The function returns a dict with ``score`` and these keys. It also receives ``extra_info["experiment_name"]``, as in
    verl's manager of the same name. GDPO: https://arxiv.org/abs/2601.05242.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reward_keys: list[str] = list(verl_options(self.config, "algorithm.gdpo_reward_keys") or ())

    async def to_sample(self, data: Any) -> RewardSample:
        """Return the sample in ``data``, with the experiment's name in its extra info."""
        sample = await super().to_sample(data)
        name = verl_options(self.config, "trainer.experiment_name")
        return replace(sample, extra_info={**sample.extra_info, "experiment_name": name})

    async def score_one(self, sample: RewardSample) -> RewardResult:
        """Score the sample. It fails if one of the rewards is missing or not a finite number."""
        result = await super().score_one(sample)
        if result.score is None:
            return result
        wrong = [key for key in self.reward_keys if not _is_number(result.extra_info.get(key))]
        if not wrong:
            return result
        problem = (
            f"must return a dict with a number for each of algorithm.gdpo_reward_keys; "
            f"{listing(wrong)} is missing or not a number, in {shorten(dict(result.extra_info))}"
        )
        return failed_after(result, InvalidScoreError(problem, sample=sample, function=self.function.name))

    def to_reward(self, result: RewardResult) -> Reward:
        """Return the reward. If the policy ``default`` applies, all rewards of the sample are the default score.

        A masked sample gets no such rewards, because they would count in the means.
        """
        reward = super().to_reward(result)
        info = reward["reward_extra_info"]
        if result.score is None and not info["reward_masked"]:
            info.update(dict.fromkeys(self.reward_keys, reward["reward_score"]))
        return reward


def _is_number(value: Any) -> bool:
    number = finite_number(value)
    return number is not None and is_finite(number)
