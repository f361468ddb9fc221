"""The seconds of a training step by part. No verl, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["judging_s", "overlap_metrics"]


def judging_s(judged: Sequence[tuple[float, float]]) -> float:
    """Estimates how many seconds judging takes alone, for the rewards that arrived in a step.

    The estimate assumes that all these rewards are requested at once. A reward counts in the step in which it
    arrives, with all the seconds since its request, including those before the step. Judging takes as long as the
    slowest of these rewards, or longer if judges return a limited number of rewards a second. That rate is taken
    from the shortest time in which half of the rewards arrived. The result is at most the time during which at
    least one of these rewards was pending. Times in which judges are idle, or only a few of them work, do not
    count.

    Args:
        judged: for each reward, the times of the request and of the arrival.
    """
    if not judged:
        return 0.0
    longest = max(arrived - requested for requested, arrived in judged)
    arrivals = sorted(arrived for _, arrived in judged)
    half = len(arrivals) // 2
    if not half:
        return longest
    fastest = min(later - sooner for sooner, later in zip(arrivals, arrivals[half:], strict=False))
    return min(_union_s(judged), max(longest, fastest * len(arrivals) / half))


def _union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of the intervals, in seconds."""
    total, covered_until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total


def overlap_metrics(step: float, *, generation: float, waiting: float, judging: float) -> dict[str, float]:
    """Returns the metrics of the seconds of a training step by part, for verl's logger, by name.

    Args:
        step: the whole step, with the weight synchronisation, without checkpoint and validation. Its rest, after
            generation and waiting, is training: log-probabilities, values, advantages, updates, and weights.
        generation: waiting for rollouts.
        waiting: waiting for rewards, while no rollout is missing.
        judging: judging alone, for the rewards that arrived in the step; see `judging_s`.
    """
    # The step if all judging were hidden. Judging that began before the step counts at most as long as the step.
    floor = max(step - waiting, min(judging, step))
    return {
        "reward_pipeline/generation_s": generation,
        "reward_pipeline/judging_s": judging,
        "reward_pipeline/training_s": step - generation - waiting,
        "reward_pipeline/waiting_for_rewards_s": waiting,
        "reward_pipeline/waiting_share": waiting / step if step else 0.0,
        "reward_pipeline/hidden_share": 1 - min(1.0, waiting / judging) if judging else 1.0,
        "reward_pipeline/floor_s": floor,
        "reward_pipeline/over_floor": step / floor - 1 if floor else 0.0,
    }
