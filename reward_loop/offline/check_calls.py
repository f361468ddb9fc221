"""Calls a reward function on samples through its manager, as a run does."""

from __future__ import annotations

import asyncio
import errno
import itertools
import math
import socket
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from reward_loop._util.event_loops import line_on_loop
from reward_loop.config import RewardLoopConfig
from reward_loop.managers.scorer import load_scorer, scored
from reward_loop.offline.run import for_each
from reward_loop.scoring import ListScoringFunction, ScoringFunction
from reward_loop.types import RewardSample, is_returned

_LOOK_S = 0.005
"""The seconds between two looks at the line that an event loop is at."""


@dataclass(frozen=True, slots=True)
class Callee:
    """A function that the check calls."""

    name: str
    """Name and file of the function."""
    is_async: bool
    in_processes: bool


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """The result of one sample."""

    uid: str
    outcome: str
    score: float | None
    seconds: float
    """Run time of the function, in seconds."""
    components: Mapping[str, Any]
    error: str

    @property
    def shown(self) -> str:
        """Outcome and score, for a message."""
        return self.outcome if self.score is None else f"{self.outcome} {self.score:.6g}"

    def same(self, other: CheckedRow) -> bool:
        """Return whether both have the same outcome and score."""
        return (self.outcome, self.score) == (other.outcome, other.score)


Status = Literal["ok", "note", "problem", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    text: str
    """What was observed and, for a problem, what to change."""


class Calls:
    """Calls the function.

    Args are those of `check`, with the number of samples: a batch function receives all of them in one call.
    """

    def __init__(
        self,
        function: Any,
        samples: int,
        *,
        manager: str,
        options: RewardLoopConfig,
        reward_kwargs: Mapping[str, Any] | None,
        router_address: str | None,
        concurrency: int,
    ) -> None:
        # Failures are reported and must not stop the check. A batch function gets all samples in one call. A stored
        # score would hide that results differ.
        update: dict[str, Any] = {
            "max_failed_share": 1.0,
            "on_failed": "mask",
            "on_unscored": "mask",
            "max_threads": concurrency,
            "outage_timeout_s": 0.0,  # an unreachable judge is what the check is to find
            "batch": options.batch.model_copy(update={"max_batch_size": samples}),
        }
        scorer = load_scorer(
            function,
            manager,
            options.model_copy(update=update),
            reward_kwargs=reward_kwargs,
            router_address=router_address,
        )
        self._manager = scorer.manager
        self.is_batched = getattr(self._manager, "function_type", ScoringFunction) is ListScoringFunction
        self.of_groups = getattr(self._manager, "needs_group", False)
        self._groups = itertools.count()
        self.function: Any = scorer.function
        self.requires: frozenset[str] = self.function.requires
        """The fields of a sample that the function requires."""
        self.is_async: bool = self.function.is_async
        self.in_processes: bool = self.function.in_processes

    def callee(self) -> Callee:
        """Return the called function, for the report."""
        return Callee(self.function.name, self.is_async, self.in_processes)

    def close(self) -> None:
        """Stop the worker processes of the function."""
        self.function.close()

    async def run(self, samples: Sequence[RewardSample]) -> list[CheckedRow]:
        """Score samples at the same time; a batch function receives all of them in one call."""
        if self.is_batched:
            group = f"group {next(self._groups)}" if self.of_groups else None
            samples = [replace(sample, group=group, group_size=len(samples)) for sample in samples]
        return list(await asyncio.gather(*map(self._run_one, samples)))

    async def run_each(self, samples: Sequence[RewardSample], concurrency: int) -> list[CheckedRow]:
        """Score each sample in a call of its own, ``concurrency`` at a time."""
        rows: dict[int, CheckedRow] = {}

        async def run(index: int) -> None:
            [rows[index]] = await self.run([samples[index]])

        await for_each(range(len(samples)), concurrency, run)
        return [rows[index] for index in range(len(samples))]

    async def _run_one(self, sample: RewardSample) -> CheckedRow:
        result, _ = await scored(self._manager, sample, sample.uid)
        info = result.extra_info
        return CheckedRow(
            sample.uid or "",
            result.outcome,
            result.reward,
            result.work_s,
            {name: value for name, value in info.items() if is_returned(name)},
            result.error or "",
        )


async def outside_the_main_thread(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on an event loop in another thread: where runs call functions, and signals do not work."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="check", daemon=True)
    thread.start()
    try:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
    finally:
        loop.call_soon_threadsafe(loop.stop)


@contextmanager
def failing_requests() -> Iterator[list[str]]:
    """Refuse all connections of this process to services, also those that are open. Yields the refused calls."""
    refused: list[str] = []

    def failing(name: str) -> Callable[..., Any]:
        usual = getattr(socket.socket, name)

        def call(self: socket.socket, *arguments: Any) -> Any:
            if self.family not in (socket.AF_INET, socket.AF_INET6):
                return usual(self, *arguments)
            refused.append(name)
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused by reward-loop check")

        return call

    names = ("connect", "connect_ex", "send", "sendall")
    own = {name: vars(socket.socket).get(name) for name in names}
    for name in names:
        setattr(socket.socket, name, failing(name))
    try:
        yield refused
    finally:
        for name, method in own.items():
            if method is None:
                delattr(socket.socket, name)
            else:
                setattr(socket.socket, name, method)


class StepTimer:
    """Measures the longest step of all tasks that are created while it is open, and finds the line of code in it.

    A step is what a task does between two waits; no other task runs meanwhile. Unlike the delay of a timer, it does not
    grow when other processes use the machine's cores while this one waits.

    Args:
        on_blocked: called in another thread, once, with the line of a step that has taken ``blocked_s`` seconds.
    """

    def __init__(self, blocked_s: float = math.inf, on_blocked: Callable[[str], None] = lambda line: None) -> None:
        self.longest_s = 0.0
        self.line: str | None = None
        """Where the longest step spent most of its time, such as ``compute_score (reward.py:12)``; ``None`` if it was
        short."""
        self._blocked_s = blocked_s
        self._on_blocked = on_blocked
        self._step: _MeasuredStep | None = None
        self._closed = threading.Event()

    def __enter__(self) -> StepTimer:
        self._loop = asyncio.get_running_loop()
        self._factory = self._loop.get_task_factory()
        self._loop.set_task_factory(self._new_task)
        thread = threading.get_ident()
        threading.Thread(target=self._look, args=(thread,), name="step-timer", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._loop.set_task_factory(self._factory)

    def _look(self, thread: int) -> None:
        while not self._closed.wait(_LOOK_S):
            step = self._step
            if step is None:
                continue
            if (line := line_on_loop(thread)) is not None:
                step.lines[line] += 1
            if time.perf_counter() - step.started > self._blocked_s:
                self._on_blocked(line or "code that is unknown")
                return

    def _new_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        # Not `create_task`, which would call this factory again.
        task = asyncio.Task(self._run(coroutine), loop=loop, **options)
        task.add_done_callback(lambda task: coroutine.close())  # of a task that was cancelled before its first step
        return task

    async def _run(self, coroutine: Any) -> Any:
        return await self._steps(coroutine)

    @types.coroutine
    def _steps(self, coroutine: Any) -> Generator[Any, Any, Any]:
        # The coroutine is driven by hand: only so are the times between its waits known.
        step, value = coroutine.send, None
        while True:
            measured = self._step = _MeasuredStep(time.perf_counter(), Counter())
            try:
                future = step(value)
            except StopIteration as stop:
                return stop.value
            finally:
                self._step = None
                seconds = time.perf_counter() - measured.started
                if seconds > self.longest_s:
                    self.longest_s = seconds
                    self.line = next((line for line, _ in measured.lines.most_common(1)), None)
            try:
                step, value = coroutine.send, (yield future)
            except BaseException as error:  # also the cancellation of the task
                step, value = coroutine.throw, error


@dataclass(frozen=True, slots=True)
class _MeasuredStep:
    started: float
    lines: Counter[str]
    """The line at which the step was when the thread of the timer looked -> how often."""
