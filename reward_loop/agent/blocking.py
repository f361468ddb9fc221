"""The agent for synchronous programs: it runs on an event loop in its own thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self

from reward_loop._util.event_loops import in_background
from reward_loop.agent.agent import RewardAgent
from reward_loop.agent.pending import Group, MiniBatch, PendingRewards
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.types import Reward


class BlockingRewardAgent:
    """`RewardAgent` without ``async``: a context manager with the same `submit`.

    Samples are scored in the background while the caller trains. Leaving it closes the manager, as for `RewardAgent`.
    """

    def __init__(self, manager: Any, *, concurrency: int | None = None) -> None:
        """Create an agent; see `RewardAgent` for the arguments."""
        self._agent = RewardAgent(manager, concurrency=concurrency)
        self._stack = ExitStack()
        self._pid: int | None = None

    def __enter__(self) -> Self:
        self._pid = os.getpid()
        self._stack.enter_context(in_background(lambda: self._agent, name="reward-agent"))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stack.close()
        if error is None:
            # `in_background` exits the agent by cancellation, after which the agent raises no error of a batch.
            self._agent._raise_unseen_error()

    def submit(
        self, samples: Iterable[Any], *, group_size: int | None = None, groups: Sequence[int] | None = None
    ) -> BlockingPendingRewards:
        """Submit a batch; return at once. See `RewardAgent.submit`."""
        loop = self._open_loop()
        # Registered in this thread, so that the caller does not wait for the event loop.
        pending = self._agent._accept(samples, group_size, groups)
        loop.call_soon_threadsafe(self._agent._start, pending)
        return BlockingPendingRewards(pending, self)

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        loop = self._agent.loop
        if loop is None:
            raise RewardLoopError("enter the agent first: `with BlockingRewardAgent(...)`")
        if loop.is_closed():
            raise RewardLoopError("the agent is closed")
        if self._pid != os.getpid():  # a fork does not copy the thread of the event loop: the call would never end
            raise RewardLoopError(
                "this agent belongs to the process that entered it: create another one in the forked process"
            )
        return loop


class BlockingPendingRewards:
    """`PendingRewards` without ``async``."""

    def __init__(self, pending: PendingRewards, agent: BlockingRewardAgent) -> None:
        self._pending = pending
        self._agent = agent

    @property
    def group_count(self) -> int:
        """The number of groups."""
        return self._pending.group_count

    def done(self) -> bool:
        """Whether all groups are complete, or an error or `cancel` has ended the batch."""
        return self._pending.done()

    def complete_groups(self, first: int = 0, last: int | None = None) -> list[Group]:
        """Return the complete groups ``first`` to ``last - 1``, counted in order of completion."""
        return self._pending.complete_groups(first, last)

    def cancel(self) -> None:
        """Cancel the samples that have not ended."""
        if not self.done():
            # On the event loop: only there may the state of a batch change.
            self._agent._open_loop().call_soon_threadsafe(self._pending.cancel)

    def result(self, timeout: float | None = None) -> list[Reward]:
        """Wait for all rewards, in order of submission; raise `TimeoutError` after ``timeout`` seconds.

        After that, the batch continues, and you can wait again.
        """
        self._wait(self._pending.group_count, timeout)
        return [scored[1] for scored in self._pending._scored if scored is not None]

    def mini_batches(self, groups: int) -> Iterator[MiniBatch]:
        """Yield mini-batches of ``groups`` groups as they complete; the last one may have fewer."""
        if groups < 1:
            raise ConfigError(f"a mini-batch needs at least one group, not {groups}")
        for first in range(0, self._pending.group_count, groups):
            self._wait(first + groups, None)
            yield MiniBatch(tuple(self._pending.complete_groups(first, first + groups)))

    def _wait(self, groups: int, timeout: float | None) -> None:
        if not self._pending._has(groups):
            self._agent._open_loop()  # raises if nothing would ever end the wait
        self._pending._wait_in_thread(groups, timeout)
