"""Which agent loop worker has which prompts. Does not import verl."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from reward_loop.errors import RewardLoopError

__all__ = ["MAX_DEATHS", "Assignments"]

MAX_DEATHS = 3
"""How many workers may die while they have the same prompt. The next death ends the run."""


@dataclass(slots=True)
class _Prompt:
    worker: int
    batch: Any
    position: int
    deaths: int = 0


class Assignments:
    """The prompts of each worker, with their data, so that the prompts of a dead worker can be sent again."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}

    def assign(self, worker: int, batch: Any, uids: Iterable[str]) -> None:
        """Records that a worker received prompts: ``batch`` has a row for each uid, and can be sliced."""
        for position, uid in enumerate(uids):
            self._prompts[uid] = _Prompt(worker, batch, position)

    def keep(self, unfinished: Collection[str]) -> None:
        """Removes all prompts but these."""
        self._prompts = {uid: prompt for uid, prompt in self._prompts.items() if uid in unfinished}

    def of(self, workers: Collection[int]) -> set[str]:
        """Returns the uids of the prompts of these workers. Some of the prompts may be finished."""
        return {uid for uid, prompt in self._prompts.items() if prompt.worker in workers}

    def get(self, uid: str) -> tuple[int, Any]:
        """Returns the number of the worker that has a prompt, and the prompt's data, a slice of its batch."""
        prompt = self._prompts[uid]
        return prompt.worker, prompt.batch[prompt.position : prompt.position + 1]

    def count_deaths(self, uids: Collection[str]) -> None:
        """Records that the worker of these prompts died before they were finished.

        Raises:
            RewardLoopError: this happened more than `MAX_DEATHS` times to one of them.
        """
        for uid in uids:
            self._prompts[uid].deaths += 1
        if worst := sorted(uid for uid in uids if self._prompts[uid].deaths > MAX_DEATHS):
            more = f" and {len(worst) - 1} other prompts" if len(worst) > 1 else ""
            raise RewardLoopError(
                f"{MAX_DEATHS + 1} agent loop workers died in a row while they had prompt {worst[0]}{more}: does the "
                "agent loop or one of its tools crash the interpreter, or run out of memory?"
            )
