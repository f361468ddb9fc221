"""A generation of TRL's that pauses while its completions are judged, its batch, and its judging.

TRL generates and scores a batch in one function. The function runs in a greenlet here: the first reward function that
TRL calls starts all async functions and switches back to the training, which resumes the greenlet when it needs the
rewards. Between these two points, the training generates the next batch.

Does not import TRL, so that it is tested without it.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from greenlet import getcurrent, greenlet

from reward_loop.errors import RewardLoopError
from reward_loop.records import hidden_share


class GenerationBatch(list[Any]):
    """A batch of prompts. TRL's loader yields it once for each update in which its completions are used."""

    # A class of its own, since a plain list accepts no attributes.
    following: GenerationBatch | None = None
    """The batch for which completions are generated next; ``None`` at the end of an epoch or of the training."""
    step: int = 0
    """The number of finished optimizer steps when the batch is trained on."""


class Lookahead:
    """Reads the batches of one epoch from its iterator."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._read: deque[GenerationBatch] = deque()

    def take(self, count: int, every: int, *, step: int, last_step: int, accumulation: int) -> list[GenerationBatch]:
        """Return the batches of one optimizer step; fewer at the end of the epoch.

        Args:
            count: the number of batches.
            every: generation happens once for this many batches.
            step: the number of finished optimizer steps.
            last_step: the number of optimizer steps of the training.
            accumulation: the number of batches of an optimizer step.
        """
        while len(self._read) < count + every:
            try:
                self._read.append(GenerationBatch(next(self.source)))
            except StopIteration:
                break
        known = list(self._read)
        batches = [self._read.popleft() for _ in range(min(count, len(known)))]
        needed = len(batches) + max(0, last_step - step - 1) * accumulation
        for index, batch in enumerate(batches):
            batch.step = step
            after = index + every
            batch.following = known[after] if after < min(len(known), needed) else None
            if batch.following is not None:
                batch.following.step = step + after // accumulation
        return batches


class Judging:
    """Runs the async reward functions of a batch on an event loop in another thread.

    Args:
        functions: the async reward functions, each with its index among all reward functions.
        call: the keyword arguments that TRL passes to each reward function.
        loop: the event loop.
    """

    def __init__(
        self,
        functions: Mapping[int, Callable[..., Awaitable[Any]]],
        call: Mapping[str, Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.waiting_s = 0.0
        """Seconds for which `rewards` has waited."""
        self._began = self._ended = time.perf_counter()
        self._log_metric: Callable[[str, float], None] | None = call.get("log_metric")
        self._logged: list[Callable[[], None]] = []
        # TRL collects what functions log until the next rewards are complete: those of another batch.
        deferred = {name: self._deferred(call[name]) for name in ("log_extra", "log_metric") if name in call}
        self._futures: dict[int, Future[Any]] = {
            index: asyncio.run_coroutine_threadsafe(self._timed(function, {**call, **deferred}), loop)
            for index, function in functions.items()
        }
        """The calls whose rewards were not collected."""

    def _deferred(self, log: Callable[..., None]) -> Callable[..., None]:
        return lambda *values: self._logged.append(partial(log, *values))

    async def _timed(self, function: Callable[..., Awaitable[Any]], arguments: Mapping[str, Any]) -> Any:
        try:
            return await function(**arguments)
        finally:
            self._ended = time.perf_counter()

    def rewards(self, index: int) -> Any:
        """Wait for the rewards of a function, and log what the functions have logged so far.

        The rewards of the last function also log for how long the batch was judged and waited for. Until the last
        function has returned, at least one reward of the batch is pending.

        Raises:
            Exception: what the function raised. The other functions are cancelled.
        """
        began = time.perf_counter()
        try:
            rewards = self._futures[index].result()
        except BaseException:
            self.cancel()
            raise
        self.waiting_s += time.perf_counter() - began
        # Not a loop over the list: functions that still run append to it.
        while self._logged:
            self._logged.pop(0)()
        del self._futures[index]
        if not self._futures and self._log_metric is not None:
            judging_s = self._ended - self._began
            self._log_metric("overlap/waiting_seconds", self.waiting_s)
            self._log_metric("overlap/judging_seconds", judging_s)
            if (hidden := hidden_share(self.waiting_s, judging_s)) is not None:
                self._log_metric("overlap/hidden_share", hidden)
        return rewards

    def cancel(self) -> None:
        """Cancel the calls that have not ended."""
        for future in self._futures.values():
            future.cancel()


class Generation(greenlet):
    """One run of TRL's function that generates and scores a batch. Drop it if it is not finished.

    Python's garbage collector does not find a paused greenlet, so an owner must call `finish` or `drop`.

    Args:
        run: TRL's function.
        inputs: the batch.
        judge: starts the async reward functions, with the arguments of a reward function.
    """

    def __init__(self, run: Callable[[Any], Any], inputs: Any, judge: Callable[[Mapping[str, Any]], Judging]) -> None:
        super().__init__(run)
        # A greenlet starts with an empty context, without the settings of the training's thread.
        self.gr_context = contextvars.copy_context()
        self.inputs: GenerationBatch = inputs
        self.judging: Judging | None = None
        self._judge = judge
        self._output: Any = None

    def start(self) -> None:
        """Generate, and return when the judges have started."""
        self._output = self.switch(self.inputs)

    def finish(self) -> Any:
        """Wait for the judges, and return TRL's output."""
        if not self.dead:
            self._output = self.switch()
        return self._output

    def drop(self) -> None:
        """Cancel the judges, and end the run."""
        if not self.dead:
            self.throw()

    def pause(self, call: Mapping[str, Any]) -> Judging:
        """Start the judges and pause, once for each run. Called within the run."""
        if self.judging is None:
            judging = self.judging = self._judge(call)
            assert self.parent is not None
            try:
                self.parent.switch()
            except BaseException:  # `drop` ends the run here
                judging.cancel()
                raise
        return self.judging


def pausing(functions: Sequence[Any], is_async: Callable[[Any], bool]) -> tuple[list[Any], dict[int, Any]]:
    """Return synchronous reward functions that pause the current `Generation`, and the async ones by their index.

    Models stay as they are: TRL calls them without arguments of reward functions.

    Args:
        functions: TRL's reward functions.
        is_async: whether TRL treats a function as async.
    """
    awaited = {index: function for index, function in enumerate(functions) if is_async(function)}
    replaced = [
        function if _is_model(function) else partial(_paused, index, None if index in awaited else function)
        for index, function in enumerate(functions)
    ]
    return replaced, awaited


# Positional only: a column of the data set may be named `index` or `function`.
def _paused(index: int, function: Callable[..., Any] | None, /, **call: Any) -> Any:
    """Return the rewards of a function; ``function`` is ``None`` for an async one, whose rewards are waited for."""
    generation = getcurrent()
    if not isinstance(generation, Generation):
        raise RewardLoopError("OverlappedGRPOTrainer computes rewards only within its own generation of completions")
    judging = generation.pause(call)
    return judging.rewards(index) if function is None else function(**call)


def _is_model(function: Any) -> bool:
    import torch

    return isinstance(function, torch.nn.Module)
