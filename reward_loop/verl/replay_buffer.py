"""How long verl's replay buffer waits for rollouts and their rewards: by itself, for ever."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from reward_loop.errors import RewardLoopError

__all__ = ["Patience"]

NAMED_PROMPTS = 5
"""How many prompts an error message names."""


class Patience:
    """Looks in at every poll of a replay buffer while it waits.

    Args:
        buffer: verl's replay buffer; its pause between two polls is replaced.
        look: called at every poll; what it raises ends the wait.
        stall_timeout_s: the wait ends when, for so many seconds of it, no prompt began or ended and no rollout with its
            reward came; ``None`` waits for ever.
        option: the name of ``stall_timeout_s`` for messages.
    """

    def __init__(
        self, buffer: Any, look: Callable[[], None], stall_timeout_s: float | None = None, option: str = ""
    ) -> None:
        self._buffer = buffer
        self._look = look
        self._stall_timeout_s = stall_timeout_s
        self._option = option
        self._pause = buffer._wait_for_next_poll
        self._state: Any = None
        self._quiet = 0.0
        """Seconds of waiting since something happened; the trainer's other work does not count."""
        buffer._wait_for_next_poll = self._wait

    def _wait(self, partition_id: str, last_debug_time: float) -> float:
        self._look()
        waiting = self._waiting(partition_id)
        state = (partition_id, waiting, len(self._buffer.partitions[partition_id]))
        if state != self._state:
            self._state, self._quiet = state, 0.0
        if self._stall_timeout_s is not None and self._quiet > self._stall_timeout_s:
            raise RewardLoopError(self._stalled(partition_id, sorted(waiting)))
        began = monotonic()
        try:
            return self._pause(partition_id, last_debug_time)
        finally:
            self._quiet += monotonic() - began

    def _waiting(self, partition_id: str) -> frozenset[str]:
        """The prompts of which a rollout or a reward is missing."""
        return frozenset(self._buffer.pending_keys[partition_id] | self._buffer.running_keys[partition_id])

    def _stalled(self, partition_id: str, prompts: list[str]) -> str:
        what = "validation" if partition_id == "val" else "training"
        lines = []
        for uid in prompts[:NAMED_PROMPTS]:
            there = {key.split("_")[1] for key in self._buffer.partitions[partition_id] if key.split("_")[0] == uid}
            lines.append(f"prompt {uid}: rewards of rollouts {', '.join(sorted(there)) or 'none'} are there")
        if len(prompts) > NAMED_PROMPTS:
            lines.append(f"and {len(prompts) - NAMED_PROMPTS} prompts more")
        listed = "\n  ".join(lines)
        return (
            f"nothing happened for {self._quiet:.0f} s while {what} waited for {len(prompts)} prompts "
            f"({self._option}={self._stall_timeout_s:g}). reward_loop.watchdog_s logs what rewards are at. "
            f"Missing:\n  {listed}"
        )
