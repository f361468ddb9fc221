"""The order of the parts of a training step, with the two overlaps.

A pure object without clock or rewards: verl's trainer executes its actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from reward_loop.errors import ConfigError

__all__ = ["Action", "Generate", "Prepare", "StepOrder", "Train", "Wait"]


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
