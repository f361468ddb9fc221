"""A generation of TRL's that pauses while its completions are judged.

TRL generates and scores a batch in one function. The function runs in a greenlet here: the first reward function that
TRL calls starts all async functions and switches back to the training, which resumes the greenlet when it needs the
rewards. Between these two points, the training generates the next batch.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from greenlet import getcurrent, greenlet

from reward_loop.adapters.trl.judging import Judging
from reward_loop.adapters.trl.lookahead import GenerationBatch
from reward_loop.errors import RewardLoopError

__all__ = ["Generation", "pausing"]


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
