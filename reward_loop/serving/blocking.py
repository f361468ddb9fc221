"""Runs a `RewardModelManager` in a background thread, for synchronous programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from reward_loop._util.background_loop import in_background
from reward_loop.config import RewardModelConfig
from reward_loop.serving.manager import RewardModelManager

if TYPE_CHECKING:
    from reward_loop.serving.reservation import Placement

__all__ = ["ServedRewardModel", "serve_reward_model"]


class ServedRewardModel:
    """Controls a :class:`RewardModelManager` that runs in another thread; see :func:`serve_reward_model`."""

    def __init__(self, manager: RewardModelManager, loop: asyncio.AbstractEventLoop) -> None:
        self._manager = manager
        self._loop = loop

    @property
    def reward_router_address(self) -> str:
        """``host:port`` of the router."""
        return self._manager.reward_router_address

    def sleep(self) -> None:
        """Frees the models' memory, and returns when that is done; see :meth:`RewardModelManager.sleep`."""
        self._run(self._manager.sleep())

    def wake(self) -> None:
        """Allocates the models' memory again, and returns when that is done; see :meth:`RewardModelManager.wake`."""
        self._run(self._manager.wake())

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


@contextmanager
def serve_reward_model(config: RewardModelConfig, gpus: Placement | None = None) -> Iterator[ServedRewardModel]:
    """Runs a :class:`RewardModelManager` on an event loop in a background thread, for synchronous programs.

        with serve_reward_model(RewardModelConfig(model_path="...")) as model:
            train(reward_router_address=model.reward_router_address)

    The processes are stopped when the block ends, or when the interpreter exits inside the block.

    Args:
        config: as for :class:`RewardModelManager`.
        gpus: as for :class:`RewardModelManager`.

    Yields:
        the router's address and the methods ``sleep`` and ``wake``, once all processes are ready.

    Raises:
        ConfigError, ServerStartError: as on entry of :class:`RewardModelManager`.
    """

    @asynccontextmanager
    async def serving() -> AsyncIterator[ServedRewardModel]:
        async with RewardModelManager(config, gpus) as manager:
            yield ServedRewardModel(manager, asyncio.get_running_loop())

    with in_background(serving, name="reward-model-manager") as model:
        yield model
