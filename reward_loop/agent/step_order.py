"""The order of the parts of a training step, with the two overlaps.

A pure object without clock or rewards: verl's trainer executes its actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from reward_loop.errors import ConfigError

__all__ = ["Action", "FilterForecast", "Generate", "Prepare", "StepOrder", "Train", "Wait"]


@dataclass(frozen=True, slots=True)
class Generate:
    """Roll out the batch of a step, and submit its samples for scoring."""

    step: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Compute what needs no reward for the whole batch: old and reference log-probabilities, values."""

    step: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until ``mini_batches`` mini-batches of a step have all their rewards."""

    step: int
    mini_batches: int


@dataclass(frozen=True, slots=True)
class Train:
    """Update on ``count`` mini-batches, starting with number ``first`` in order of completion."""

    step: int
    first: int
    count: int


Action = Generate | Prepare | Wait | Train


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The order of a training step's parts.

    *Mini-batch pipeline*: train on all mini-batches whose rewards are in, while the others are being judged. *One-step
    off-policy*: run the rollout of the next step before waiting for the rewards of this step. With neither, wait for
    all rewards of a step before anything else, as verl's mode ``sync`` does.
    """

    mini_batches: int = 1
    """Optimizer updates per step."""
    mini_batch_pipeline: bool = False
    one_step_off_policy: bool = False

    def __post_init__(self) -> None:
        if self.mini_batches < 1:
            raise ConfigError(f"mini_batches: at least 1, got {self.mini_batches}")

    @property
    def overlaps(self) -> bool:
        """Whether the trainer does anything while rewards are pending."""
        return self.mini_batch_pipeline or self.one_step_off_policy

    def actions(
        self, steps: int, ready: Callable[[int], int], *, first_step: int = 0, generated: bool = False
    ) -> Iterator[Action]:
        """Yield the actions in order. The caller completes each action before it asks for the next.

        Args:
            steps: the number of training steps.
            ready: returns how many mini-batches of a step have all their rewards now.
            first_step: the number of the first step.
            generated: whether the batch of the first step was already rolled out and submitted, as after a resume.
        """
        last_step = first_step + steps - 1
        for step in range(first_step, last_step + 1):
            if (step == first_step and not generated) or (step > first_step and not self.one_step_off_policy):
                yield Generate(step)
            if self.one_step_off_policy and step < last_step:
                yield Generate(step + 1)
            # Before the wait: it needs no reward.
            if self.overlaps:
                yield Prepare(step)
            trained = 0
            while trained < self.mini_batches:
                wanted = trained + 1 if self.mini_batch_pipeline else self.mini_batches
                if ready(step) < wanted:
                    yield Wait(step, wanted)
                # Only once: without an overlap, the first turn trains on all mini-batches.
                if not self.overlaps:
                    yield Prepare(step)
                count = (ready(step) if self.mini_batch_pipeline else self.mini_batches) - trained
                yield Train(step, trained, count)
                trained += count


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
