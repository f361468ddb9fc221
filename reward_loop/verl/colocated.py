"""A reward model on the trainer's GPUs. It is awake only while samples are judged; the rollout sleeps then."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Self

from ray.util.placement_group import PlacementGroup

from reward_loop.config import RewardModelConfig
from reward_loop.serving.blocking import ServedRewardModel, serve_reward_model
from reward_loop.serving.reservation import SharedGpus
from reward_loop.verl.cluster import accelerator
from reward_loop.verl.reward_metrics import added_seconds
from reward_loop.verl.router_address import RouterAddress, router_address

__all__ = ["ColocatedRewardModel"]

logger = logging.getLogger(__name__)


class ColocatedRewardModel:
    """A reward model that the trainer wakes up and puts to sleep. A context manager: the servers stop at exit.

    Args:
        config: the options of the servers; the placement must be ``colocated``.
        workers: the number of reward workers.
    """

    def __init__(self, config: RewardModelConfig, workers: int) -> None:
        self._config = config
        self._workers = workers
        self._stack = ExitStack()
        self._model: ServedRewardModel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, groups: Sequence[PlacementGroup]) -> RouterAddress:
        """Starts the servers on the GPUs of these placement groups, and puts them to sleep.

        Args:
            groups: placement groups with enough free GPU memory at this moment.

        Returns:
            The address of the router for the reward workers.

        Raises:
            ConfigError, ServerStartError: as :class:`RewardModelManager` does on entry.
        """
        self._model = self._stack.enter_context(serve_reward_model(self._config, SharedGpus(groups, accelerator())))
        self._model.sleep()
        logger.info("the reward model sleeps")
        address = self._model.reward_router_address
        return self._stack.enter_context(router_address(address, self._config, self._workers))

    @contextmanager
    def awake(self, metrics: dict[str, float] | None = None) -> Iterator[None]:
        """Wakes the model up for the block, and then puts it to sleep.

        Args:
            metrics: the seconds of both operations are added here.

        Raises:
            ServerError: a server did not wake up, or did not go to sleep.
        """
        metrics = {} if metrics is None else metrics
        with added_seconds("reward_loop/model_wake_s", metrics):
            self._model.wake()
        # No `finally`: if judging fails, the run and its servers stop.
        yield
        with added_seconds("reward_loop/model_sleep_s", metrics):
            self._model.sleep()
