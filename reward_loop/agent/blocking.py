"""The agent for synchronous programs: it runs on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from reward_loop.agent.agent import RewardAgent
from reward_loop.agent.pending import Group, MiniBatch, PendingRewards
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.types import Reward

__all__ = ["BlockingPendingRewards", "BlockingRewardAgent"]

T = TypeVar("T")


class BlockingRewardAgent:
    """`RewardAgent` without ``async``: a context manager with the same `submit`, `state` and `restore`.

    Rewards go on being computed while the caller trains.
    """

    def __init__(self, manager: Any, *, concurrency: int | None = None) -> None:
        """Take what `RewardAgent` takes."""
        self._agent = RewardAgent(manager, concurrency=concurrency)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # Imported here: the package that it lives in brings aiohttp and FastAPI along.
        from reward_loop._util.background_loop import in_background

        self._stack.enter_context(in_background(lambda: self._agent, name="reward-agent"))
        self._loop = self._agent._loop
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        # The thread's loop leaves the agent by cancellation, which hides the error of a batch that nobody waited for.
        if error is None:
            self._agent._raise_unseen()

    def submit(
        self,
        samples: Iterable[Any],
        *,
        group_size: int | None = None,
        groups: Sequence[int] | None = None,
        priority: float = 0,
        tag: Any = None,
    ) -> BlockingPendingRewards:
        """Take a batch, and return at once; see `RewardAgent.submit`."""
        loop = self._open_loop()
        # Here, and not on the loop: the caller need not wait until it is this batch's turn there.
        batch = self._agent._take_in(samples, group_size, groups, priority, tag)
        loop.call_soon_threadsafe(self._agent._go, batch)
        return BlockingPendingRewards(batch, self._run, self._call)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; see `RewardAgent.state`."""
        return self._call(self._agent.state)

    def restore(self, state: Mapping[str, Any]) -> list[BlockingPendingRewards]:
        """Take up the batches of a `state`; see `RewardAgent.restore`."""
        return [
            BlockingPendingRewards(pending, self._run, self._call)
            for pending in self._call(lambda: self._agent.restore(state))
        ]

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RewardLoopError("enter the agent first: `with BlockingRewardAgent(...)`")
        if self._loop.is_closed():
            raise RewardLoopError("the agent is closed")
        return self._loop

    def _call(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return self._run(call(), None)

    def _run(self, work: Coroutine[Any, Any, T], timeout: float | None) -> T:
        try:
            loop = self._open_loop()
        except RewardLoopError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result(timeout)
        except concurrent.futures.CancelledError:
            raise RewardLoopError("the agent was closed meanwhile") from None
        except BaseException:
            # Ctrl-C, or the timeout: whoever waited no longer does.
            future.cancel()
            raise


class BlockingPendingRewards:
    """`PendingRewards` without ``async``. Where a ``timeout`` is given, waiting longer raises `TimeoutError`; the batch
    goes on, and can be waited for again."""

    def __init__(
        self,
        pending: PendingRewards,
        run: Callable[[Coroutine[Any, Any, Any], float | None], Any],
        call: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._pending = pending
        self._run = run
        self._call = call

    def __repr__(self) -> str:
        return f"Blocking{self._pending!r}"

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Group]:
        return self.groups()

    @property
    def tag(self) -> Any:
        """What the caller gave to know the batch by."""
        return self._pending.tag

    @property
    def group_count(self) -> int:
        """How many groups it has."""
        return self._pending.group_count

    @property
    def completed(self) -> int:
        """How many of them are complete."""
        return self._pending.completed

    def done(self) -> bool:
        """Whether all groups are complete, or an error or `cancel` has ended it."""
        return self._pending.done()

    def cancel(self) -> None:
        """Cancel the samples that have not ended."""
        self._call(self._pending.cancel)

    def result(self, timeout: float | None = None) -> list[Reward]:
        """Wait for all rewards, in order of submission."""
        rewards: list[Reward] = self._run(self._pending._all(), timeout)
        return rewards

    def wait(self, groups: int, timeout: float | None = None) -> int:
        """Wait until so many groups are complete, or all; return how many are."""
        pending = self._pending
        # What is there is not asked for: the loop may be busy with the start of the next batch.
        if pending._error is None and pending.completed >= min(groups, pending.group_count):
            return pending.completed
        completed: int = self._run(pending.wait(groups), timeout)
        return completed

    def groups(self) -> Iterator[Group]:
        """Yield the groups as they complete."""
        return (mini_batch.groups[0] for mini_batch in self.mini_batches(1))

    def mini_batches(self, groups: int) -> Iterator[MiniBatch]:
        """Yield mini-batches of ``groups`` groups as they complete; the last one may have fewer."""
        if groups < 1:
            raise ConfigError(f"a mini-batch has at least one group, not {groups}")
        return self._mini_batches(groups)

    def _mini_batches(self, groups: int) -> Iterator[MiniBatch]:
        yielded = 0
        try:
            while yielded < self.group_count:
                self.wait(yielded + groups)
                chosen = self._pending.complete_groups(yielded, yielded + groups)
                yielded += len(chosen)
                yield MiniBatch(tuple(chosen))
        finally:
            if yielded == self.group_count:
                self._pending._on_delivered(self._pending)
