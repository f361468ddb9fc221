"""A `RewardAgent` for each process that calls a reward function, on an event loop in a background thread.

TRL calls reward functions from several event loops, and closes some of them after each batch.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from reward_loop._util.event_loops import in_background
from reward_loop.agent import RewardAgent
from reward_loop.errors import RewardLoopError
from reward_loop.managers.scorer import Scorer, scores_groups
from reward_loop.types import RewardResult, RewardSample


class AgentInThread:
    """A running agent; the manager is closed with it.

    Args:
        scorer: the reward manager with its function.
        concurrency: the largest number of samples that are scored at the same time; ``None`` for no limit.
    """

    def __init__(self, scorer: Scorer, concurrency: int | None = None) -> None:
        self.manager = scorer.manager
        self.requires = scorer.requires
        """The fields of a sample that the function requires."""
        self.needs_group = scores_groups(scorer.manager)
        """Whether the manager, or ``post_process_scores`` of the function, compares the samples of a group."""
        self._name = secrets.token_hex(4)
        """Part of the names of samples: several processes may record samples in one folder."""
        self._batches = itertools.count(1)
        self._stack = ExitStack()
        agent = partial(RewardAgent, self.manager, concurrency=concurrency)
        self._agent = self._stack.enter_context(in_background(agent, name="reward-agent"))
        assert self._agent.loop is not None
        self._loop = self._agent.loop

    async def score(self, samples: Sequence[RewardSample], groups: Sequence[int]) -> list[RewardResult]:
        """Return the results of samples, in order. If the caller is cancelled, so are the samples.

        Args:
            samples: the samples; members of a group are neighbours.
            groups: the size of each group.

        Raises:
            RewardLoopError: an error that must stop the run, such as too many failures; or the agent is closed.
        """
        if self._loop.is_closed():
            raise RewardLoopError("the reward agent is closed")
        batch = f"{self._name}.{next(self._batches)}"
        named = [replace(sample, uid=f"{batch}.{index}") for index, sample in enumerate(samples)]
        scoring = asyncio.run_coroutine_threadsafe(self._score(named, groups), self._loop)
        return await asyncio.wrap_future(scoring)

    async def _score(self, samples: Sequence[RewardSample], groups: Sequence[int]) -> list[RewardResult]:
        pending = self._agent.submit(samples, groups=groups)
        try:
            return await pending.results()
        except asyncio.CancelledError:
            # A cancelled `await` alone does not cancel the batch.
            pending.cancel()
            raise

    def close(self) -> None:
        """Cancel the samples that have not ended, and stop the agent. Blocks until it has stopped."""
        self._stack.close()


class AgentOwner:
    """Owns one agent in each process. It ends with `close`, or with the interpreter.

    Args:
        start: starts the agent.
    """

    def __init__(self, start: Callable[[], AgentInThread]) -> None:
        self._start = start
        # By process: a fork copies this object, but not the agent's thread.
        self._agents: dict[int, AgentInThread] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[AgentOwner], tuple[Callable[[], AgentInThread]]]:
        return type(self), (self._start,)  # a copy in another process has no agent yet

    async def get(self) -> AgentInThread:
        """Return the agent of this process; the first call starts it, and the next one, if it raises.

        It starts in a thread: loading a function may take seconds, which must not block the event loop of the trainer.
        """
        agent = self._agents.get(os.getpid())
        return await asyncio.to_thread(self._get) if agent is None else agent

    def _get(self) -> AgentInThread:
        with self._lock:
            if (agent := self._agents.get(os.getpid())) is None:
                agent = self._agents[os.getpid()] = self._start()
            return agent

    def close(self) -> None:
        """Close the agent of this process, if it was started; blocks until that is done. `get` may start another."""
        # First removed: a call during `close`, which takes a while, must not get the agent that is being closed.
        if (agent := self._agents.pop(os.getpid(), None)) is not None:
            agent.close()
