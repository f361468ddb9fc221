"""Receives the events of the agent loop workers in the trainer, without polling."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from reward_loop.errors import RewardLoopError
from reward_loop.verl.progress import Progress

__all__ = ["Listener"]

logger = logging.getLogger(__name__)

STOP_CHECK_S = 1.0
"""Seconds after which the listener thread checks whether it must stop."""

RESYNC_S = 2.0
"""Seconds without an event after which a wait calls ``resync``."""

REPORT_S = 60.0
"""Seconds between two log lines that report what the trainer waits for."""

ANSWER_S = 5.0
"""Timeout in seconds for a worker's report of its prompts, for an error message."""

NAMED_PROMPTS = 5
"""How many prompts of each worker an error message names."""


class Listener:
    """Updates a `Progress` from the events of the agent loop workers, in a thread. A context manager.

    Each worker has one open call of ``next_events``, which returns as soon as there is an event.

    Args:
        workers: the handles of the agent loop workers; ``recover`` replaces them in this list.
        progress: changed only while `lock` is held.
        recover: replaces the workers with these numbers, because they have died, and repeats what is lost. Returns the
            prompts that they had received. Called during a wait, and by `check`.
        resync: records events that the workers have not reported; called during a wait without events.
        poll: called every `RESYNC_S` seconds of a wait; raises `RewardLoopError` if the run must stop.
        stall_timeout_s: a wait fails after this many seconds without an event; ``None`` waits indefinitely.
        stall_option: the name of ``stall_timeout_s``, for messages.
    """

    def __init__(
        self,
        workers: Sequence[Any],
        progress: Progress,
        *,
        recover: Callable[[Collection[int]], Collection[str]],
        resync: Callable[[], None],
        poll: Callable[[], None],
        stall_timeout_s: float | None,
        stall_option: str,
    ) -> None:
        self._workers = workers
        self._progress = progress
        self._recover = recover
        self._resync = resync
        self._poll = poll
        self._stall_timeout_s = stall_timeout_s
        self._stall_option = stall_option
        self._changed = threading.Condition()
        self._error: RewardLoopError | None = None
        self._dead: set[int] = set()
        """The numbers of the workers that have died and are not replaced yet."""
        self._joined = dict(enumerate(self._workers))
        """The workers that the thread does not listen to yet, by number."""
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="agent loop events", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._thread.join(2 * STOP_CHECK_S)

    def wait(self, what: str, arrived: Callable[[], bool]) -> None:
        """Waits until ``arrived`` returns true; checks it after every event.

        Args:
            what: what the trainer waits for, for messages.
            arrived: called while `lock` is held.

        Raises:
            RewardLoopError: as `check` or ``poll``, or there was no event for ``stall_timeout_s`` seconds; the message
                names the unfinished prompts, and the workers that have them.
        """
        try:
            self._wait(what, arrived)
        except RewardLoopError as error:
            with self._changed:
                missing = set(self._progress.unfinished)
            raise RewardLoopError(f"{error}. Missing:\n  {self._describe(missing)}") from error

    def _wait(self, what: str, arrived: Callable[[], bool]) -> None:
        events = self._progress.events
        began = last_event = last_report = time.monotonic()
        while not self._wait_once(arrived, RESYNC_S):
            self._poll()
            now = time.monotonic()
            if self._progress.events == events:
                self._resync()
            if self._progress.events != events:
                events, last_event = self._progress.events, now
            elif self._stall_timeout_s is not None and now - last_event > self._stall_timeout_s:
                raise RewardLoopError(
                    f"nothing happened for {now - last_event:.0f} s while the trainer waited for {what} "
                    f"({self._stall_option}={self._stall_timeout_s:g})"
                )
            if now - last_report > REPORT_S:
                generating, unfinished = len(self._progress.generating), len(self._progress.unfinished)
                logger.info(
                    "still waiting for %s after %.0f s: %d prompts are being generated, %d have no reward yet",
                    *(what, now - began, generating, unfinished - generating),
                )
                last_report = now

    def _wait_once(self, arrived: Callable[[], bool], timeout: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or bool(self._dead) or arrived(), timeout)
        self.check()
        with self._changed:
            return arrived()

    def check(self) -> None:
        """Has dead workers replaced. Call it in the thread of the trainer, without holding `lock`.

        Raises:
            RewardLoopError: an event could not be received, or as ``recover``.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            dead, self._dead = sorted(self._dead), set()
        if not dead:
            return
        received = self._recover(dead)
        with self._changed:
            # Counts as an event: the recovery may have taken longer than `stall_timeout_s`, and is not a stall.
            self._progress.restart(received)
            self._joined |= {number: self._workers[number] for number in dead}
            self._changed.notify_all()
        self._resync()

    @property
    def lock(self) -> threading.Condition:
        """The lock to hold while the progress is changed or iterated over."""
        return self._changed

    def _describe(self, uids: Collection[str]) -> str:
        """Returns which worker has which sessions of these prompts, as text for an error message. Calls all workers."""
        requests = [worker.unfinished_prompts.remote() for worker in self._workers]
        found: set[str] = set()
        lines = []
        for number, request in enumerate(requests):
            worker = f"agent loop worker {number} of {len(requests)}"
            try:
                prompts = ray.get(request, timeout=ANSWER_S)
            except GetTimeoutError:
                lines.append(f"{worker} does not answer")
                continue
            except RayError as error:
                lines.append(f"{worker} is dead ({type(error).__name__})")
                continue
            missing = {uid: sessions for uid, sessions in prompts.items() if uid in uids}
            found |= missing.keys()
            lines += [f"{worker}, prompt {uid}: {sessions}" for uid, sessions in list(missing.items())[:NAMED_PROMPTS]]
            if len(missing) > NAMED_PROMPTS:
                lines.append(f"{worker}: {len(missing) - NAMED_PROMPTS} more prompts")
        lost = sorted(set(uids) - found)
        if lost:
            more = f", and {len(lost) - NAMED_PROMPTS} more" if len(lost) > NAMED_PROMPTS else ""
            lines.append(f"no answering worker has prompt {', '.join(lost[:NAMED_PROMPTS])}{more}")
        return "\n  ".join(lines)

    def _listen(self) -> None:
        requests: dict[Any, int] = {}
        while not self._closed:
            with self._changed:
                joined, self._joined = self._joined, {}
                if not joined and not requests:
                    self._changed.wait(STOP_CHECK_S)
                    continue
            requests |= {worker.next_events.remote(): number for number, worker in joined.items()}
            answered, _ = ray.wait(list(requests), num_returns=1, timeout=STOP_CHECK_S)
            for answer in answered:
                number = requests.pop(answer)
                try:
                    self._record(ray.get(answer))
                except RayActorError:
                    with self._changed:
                        self._dead.add(number)
                        self._changed.notify_all()
                    continue
                except Exception as error:
                    self._fail(number, error)
                    return
                requests[self._workers[number].next_events.remote()] = number

    def _fail(self, number: int, error: Exception) -> None:
        with self._changed:
            worker = f"agent loop worker {number} of {len(self._workers)}"
            self._error = RewardLoopError(f"no events from {worker}: {type(error).__name__}: {error}")
            self._error.__cause__ = error
            self._changed.notify_all()

    def _record(self, events: Sequence[Any]) -> None:
        with self._changed:
            now = time.monotonic()
            for event in events:
                self._progress.record(event, now)
            if events:
                self._changed.notify_all()
