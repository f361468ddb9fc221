"""`StepEvents`: the events of a trainer that uses an agent, in the same form as those of a verl run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.records import Records
from reward_loop.records.events import STEP
from reward_loop.records.rows import WaitsFor
from reward_loop.types import RewardSample

__all__ = ["StepEvents"]


class StepEvents:
    """Records steps, their phases, waits for rewards, and when each reward was requested and arrived.

    Args:
        records: the manager's records; ``None`` to record nothing.
    """

    def __init__(self, records: Records | None) -> None:
        self._records = records
        self._step: int | None = None
        self._has_steps = False
        """Whether a step has begun. The other events are read only together with steps."""

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the block as a training step; see `RewardAgent.step`."""
        if self._step is not None:
            raise RewardLoopError(f"step {number} cannot begin: step {self._step} has not ended")
        self._step, self._has_steps = number, True
        try:
            with self._recorded(STEP, number):
                yield
        finally:
            self._step = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the block as a phase of the current step; see `RewardAgent.phase`."""
        if self._step is None:
            raise RewardLoopError(f"the phase {name!r} is outside of a step: open one with `with agent.step(number)`")
        if name == STEP:
            raise ConfigError(f"the name {STEP!r} is reserved for the whole step: give the phase another name")
        with self._recorded(name, self._step):
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Record the block as a wait for rewards, if it is within a step."""
        if self._step is None:
            yield
            return
        with self._recorded("wait_reward", self._step, "rewards"):
            yield

    @contextmanager
    def _recorded(self, name: str, step: int, waits_for: WaitsFor | None = None) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            if self._records is not None:
                self._records.write_phase(name, step, start, time.time(), waits_for)

    def reward_arrived(self, sample: object, submitted: float) -> None:
        """Record a sample whose reward has arrived, after the first step has begun. Rows of verl's batch have no event.

        Args:
            sample: the sample as the manager received it.
            submitted: when it was submitted, in seconds since 1970. When it was generated is not known.
        """
        if self._records is None or not self._has_steps or not isinstance(sample, RewardSample):
            return
        times = {"end": submitted, "scoring": submitted, "scored": time.time()}
        self._records.write_rollout(
            str(sample.uid),
            sample.group,
            sample.step,
            validate=bool(sample.validate),
            start=submitted,
            times=times,
            error=None,
        )
