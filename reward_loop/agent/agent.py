"""RewardAgent: submit batches, and receive groups as their rewards complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from reward_loop.agent.pending import PendingRewards
from reward_loop.agent.runner import BatchRunner
from reward_loop.types import Reward

__all__ = ["RewardAgent"]


class RewardAgent:
    """Scores batches through one reward manager. An async context manager: it owns the tasks that it starts.

    Leaving it cancels what has not ended. If an error ended a batch that nobody waited for, leaving raises that error.

    Example:
        async with RewardAgent(manager, concurrency=256) as agent:
            pending = agent.submit(samples, group_size=5)
            async for mini_batch in pending.mini_batches(groups=4):
                train(mini_batch.indices, mini_batch.rewards)
    """

    def __init__(
        self,
        manager: Any,
        *,
        concurrency: int | None = None,
        on_ended: Callable[[Any, int, Reward], None] | None = None,
    ) -> None:
        """Create an agent; enter it before use.

        Args:
            manager: a reward manager; its ``run_single`` is awaited once per sample.
            concurrency: how many samples run at a time; ``None`` for no limit.
            on_ended: called on the event loop when a sample has ended, before its group is post-processed, with the
                batch's tag, the sample's index in the batch and its reward. For example, to keep a journal.

        Raises:
            ConfigError: the manager has no ``run_single``, or the concurrency is below 1.
        """
        self._runner = BatchRunner(manager, concurrency=concurrency, on_ended=on_ended)

    async def __aenter__(self) -> Self:
        self._runner.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.close()
        if error is None:
            self._runner.raise_unseen_error()

    @property
    def manager(self) -> Any:
        """The reward manager."""
        return self._runner.manager

    @property
    def concurrency(self) -> int | None:
        """How many samples run at a time; ``None`` for no limit."""
        return self._runner.concurrency

    @property
    def running(self) -> int:
        """The number of running samples."""
        return self._runner.running

    @property
    def waiting(self) -> int:
        """The number of samples that wait to be started."""
        return self._runner.waiting

    def submit(
        self,
        samples: Iterable[Any],
        *,
        group_size: int | None = None,
        groups: Sequence[int] | None = None,
        priority: float = 0,
        tag: Any = None,
    ) -> PendingRewards:
        """Submit a batch; return at once. Call it on the agent's event loop.

        Args:
            samples: `RewardSample`, or rows of verl's ``DataProto``. Members of a group are neighbours.
            group_size: the size of all groups; by default each sample is a group of its own.
            groups: the size of each group, if the sizes differ.
            priority: where `concurrency` makes samples wait, batches with a lower number start first (the training step
                is a good priority); among equal ones, the batch that was submitted first.
            tag: anything that identifies the batch to you, for example after `restore`.

        Raises:
            ConfigError: the samples do not divide into these groups.
            RewardLoopError: the agent is closed, was not entered, or belongs to another event loop.
        """
        self._runner.check_loop()
        batch = self._runner.accept(samples, group_size=group_size, groups=groups, priority=priority, tag=tag)
        self._runner.start(batch)
        return PendingRewards(batch)

    async def drain(self) -> None:
        """Wait until everything that was submitted has ended."""
        await self._runner.drain()

    def state(self) -> dict[str, Any]:
        """Return a checkpoint: every batch that was not delivered, with its samples and the rewards so far.

        A batch is delivered when an ``await`` of it has returned, when an iteration over it has ended, when it was
        cancelled, or when its error was raised. The state contains plain containers and the caller's own samples and
        tags, and shares no mutable object with the agent; pickle it, for example.
        """
        return self._runner.state()

    def restore(self, state: Mapping[str, Any]) -> list[PendingRewards]:
        """Resume the batches of a `state`; return them in their old order.

        Samples that had a reward are not scored again; the others are submitted. A restored batch yields all its
        groups: first those that were complete, in their old order.

        Raises:
            ConfigError: the state has another version.
        """
        return [PendingRewards(batch) for batch in self._runner.restore(state)]
