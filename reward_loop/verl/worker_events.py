"""Receives the events of the agent loop workers in the trainer, without polling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayError

from reward_loop.errors import RewardLoopError
from reward_loop.verl.progress import Progress

__all__ = ["Listener"]

WAKE_UP_S = 1.0
"""Seconds after which the listener thread checks whether it must stop."""

ANSWER_S = 5.0
"""Timeout in seconds for a worker's report of its sessions, for an error message."""

NAMED_PROMPTS = 5
"""How many prompts of each worker an error message names."""


class Listener:
    """Updates a `Progress` from the events of the agent loop workers, in a thread. A context manager.

    Each worker has one open call of ``news``, which returns as soon as there is an event.

    Args:
        workers: the handles of the agent loop workers.
        progress: changed only while `lock` is held.
    """

    def __init__(self, workers: Sequence[Any], progress: Progress) -> None:
        self._workers = list(workers)
        self._progress = progress
        self._changed = threading.Condition()
        self._error: RewardLoopError | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="agent loop news", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._thread.join(2 * WAKE_UP_S)

    def wait(self, arrived: Callable[[], bool], timeout: float) -> bool:
        """Waits until ``arrived`` returns true, or for ``timeout`` seconds; checks it after every event.

        Returns:
            The last result of ``arrived``.

        Raises:
            RewardLoopError: a worker has died.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or arrived(), timeout)
            self.raise_error()
            return arrived()

    def raise_error(self) -> None:
        """Raises the error of a worker that has died, if there is one.

        Raises:
            RewardLoopError: a worker has died.
        """
        if self._error is not None:
            raise self._error

    @property
    def lock(self) -> threading.Condition:
        """The lock to hold while the progress is changed or iterated over."""
        return self._changed

    def at_work_on(self, uids: Collection[str]) -> str:
        """Returns which worker has which sessions of these prompts, as text for an error message. Calls all workers."""
        asked = [worker.in_work.remote() for worker in self._workers]
        known: set[str] = set()
        lines = []
        for number, answer in enumerate(asked):
            who = f"agent loop worker {number} of {len(asked)}"
            try:
                in_work = ray.get(answer, timeout=ANSWER_S)
            except GetTimeoutError:
                lines.append(f"{who} does not answer")
                continue
            except RayError as error:
                lines.append(f"{who} is dead ({type(error).__name__})")
                continue
            mine = {uid: sessions for uid, sessions in in_work.items() if uid in uids}
            known |= mine.keys()
            lines += [f"{who}, prompt {uid}: {what}" for uid, what in list(mine.items())[:NAMED_PROMPTS]]
            if len(mine) > NAMED_PROMPTS:
                lines.append(f"{who}: {len(mine) - NAMED_PROMPTS} prompts more")
        lost = sorted(set(uids) - known)
        if lost:
            more = f", and {len(lost) - NAMED_PROMPTS} more" if len(lost) > NAMED_PROMPTS else ""
            lines.append(f"no worker that answers has prompt {', '.join(lost[:NAMED_PROMPTS])}{more}")
        return "\n  ".join(lines)

    def _listen(self) -> None:
        asked = {worker.news.remote(): number for number, worker in enumerate(self._workers)}
        while asked and not self._closed:
            answered, _ = ray.wait(list(asked), num_returns=1, timeout=WAKE_UP_S)
            for answer in answered:
                number = asked.pop(answer)
                try:
                    self._take(ray.get(answer))
                except Exception as error:
                    self._fail(number, error)
                    return
                asked[self._workers[number].news.remote()] = number

    def _fail(self, number: int, error: Exception) -> None:
        if self._closed:
            return
        who = f"agent loop worker {number} of {len(self._workers)}"
        with self._changed:
            self._error = RewardLoopError(f"{who} is lost, and its rollouts with it: {type(error).__name__}: {error}")
            self._error.__cause__ = error
            self._changed.notify_all()

    def _take(self, events: Sequence[Any]) -> None:
        with self._changed:
            now = time.monotonic()
            for event in events:
                self._progress.happened(event, now)
            if events:
                self._changed.notify_all()
