"""Rewards that an agent loop or an environment requests itself: `score`.

The code of an environment names no trainer. `score` uses the current scorer: within an agent loop of a verl run, the
run's reward workers; elsewhere, the one that `scorer` opened. In both cases the sample has the run's deadline, retries,
limits, budget, policies and records, as any other sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

from reward_loop._util.text import listing
from reward_loop.agent.agent import close_manager
from reward_loop.config import RewardLoopConfig, parse
from reward_loop.errors import ConfigError
from reward_loop.managers.scorer import load_scorer, scored
from reward_loop.types import Reward, RewardSample

_FIELDS = frozenset(field.name for field in fields(RewardSample))


@dataclass(frozen=True, slots=True)
class CurrentScorer:
    """What `score` uses in a task, and in the tasks that it starts."""

    score: Callable[[RewardSample], Awaitable[Reward]]
    """Scores one sample."""
    rollout: Mapping[str, Any]
    """The fields of samples that the trainer knows, such as ``uid``, ``group`` and ``step``."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make this the current scorer within the block."""
        outer = _current.get()
        _current.set(self)
        try:
            yield
        finally:
            # Not `reset`: an async generator may be closed in another context, where Python rejects the token.
            _current.set(outer)


_current: ContextVar[CurrentScorer | None] = ContextVar("scorer", default=None)


async def score(solution_str: str, **more: Any) -> Reward:
    """Score one sample with the current scorer.

    An agent loop of verl that awaits its reward passes it on with its output; a masked reward leaves the loss::

        reward = await reward_loop.score(answer, ground_truth=truth, extra_info={"question": question})
        return AgentLoopOutput(..., reward_score=reward["reward_score"],
                               extra_fields={"reward_extra_info": reward["reward_extra_info"]})

    Args:
        solution_str: what the reward function receives under this name.
        more: further fields of `RewardSample`. In a verl run, ``uid``, ``group`` and ``step`` are those of the rollout.

    Returns:
        ``{"reward_score": float, "reward_extra_info": dict}``, see `RewardLoopManagerBase.run_single`.

    Raises:
        ConfigError: there is no current scorer, or ``more`` has other fields.
        RewardLoopError: the run must stop: by the user's policy, or because too many samples failed.
    """
    current = _current.get()
    if current is None:
        raise ConfigError(
            "no scorer is open here: open one with `async with reward_loop.scorer(function)`. In a verl run, an "
            "agent loop has one; its Ray tasks and other processes do not"
        )
    if unknown := more.keys() - _FIELDS:
        raise ConfigError(
            f"a sample has no field {listing(unknown)}; it has {listing(sorted(_FIELDS))}. Put other values into "
            "extra_info"
        )
    return await current.score(RewardSample(solution_str, **{**current.rollout, **more}))


@asynccontextmanager
async def scorer(
    function: Any,
    config: RewardLoopConfig | Mapping[str, Any] | None = None,
    *,
    manager: str = "naive",
    reward_kwargs: Mapping[str, Any] | None = None,
    router_address: str | None = None,
) -> AsyncIterator[None]:
    """Make a reward function the current scorer within the block, without a trainer.

    It is current in the task that enters the block, and in the tasks that are started within it.

    Example::

        async with reward_loop.scorer("reward.py:compute_score", {"timeout": 60}):
            reward = await reward_loop.score("#### 4", ground_truth="4")

    Args:
        function: the function, or its name: ``file.py:name`` or ``package.module:name``. Loaded in a thread.
        config: the options.
        manager: the name or the import path of the reward manager.
        reward_kwargs: configured arguments of the function.
        router_address: ``host:port`` of model servers, which the function receives as ``reward_router_address``.

    Raises:
        ConfigError: an option is invalid.
        FunctionLoadError: the function cannot be found, or cannot be called with the arguments of the reward loop.
    """
    options = parse(RewardLoopConfig, config, "config")
    loaded = await asyncio.to_thread(
        load_scorer, function, manager, options, reward_kwargs=reward_kwargs, router_address=router_address
    )
    name = function if isinstance(function, str) else getattr(loaded.manager, "name", type(loaded.manager).__name__)

    async def score_one(sample: RewardSample) -> Reward:
        return (await scored(loaded.manager, sample, name))[1]

    try:
        with CurrentScorer(score_one, {}).in_use():
            yield
    finally:
        await close_manager(loaded.manager)
