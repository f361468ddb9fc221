"""A reward model on the trainer's GPUs: verl's own replicas, which it has run on GPUs, behind this library's router."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf
from verl.experimental.reward_loop import RewardModelManager

from reward_loop.config import RewardModelConfig
from reward_loop.serving.manager import serve_reward_model
from reward_loop.verl.cluster import RouterAddress, router_address
from reward_loop.verl.compat import overrides, uses
from reward_loop.verl.reward_metrics import added_seconds

__all__ = ["ColocatedRewardModel"]

uses(__name__, "verl.experimental.reward_loop:RewardModelManager", "__init__(config, resource_pool)")
uses(__name__, "verl.experimental.reward_loop:RewardModelManager", "server_addresses", "sleep()", "wake_up()")

logger = logging.getLogger(__name__)


class ColocatedRewardModel:
    """A reward model that the trainer wakes up and puts to sleep. A context manager: the router stops at exit.

    The replicas are Ray actors, which end with the run. A replica that has died ends the run when it should wake up.

    Args:
        config: verl's whole configuration.
        model: the options of the reward model.
        workers: the number of reward workers.
    """

    def __init__(self, config: DictConfig, model: RewardModelConfig, workers: int) -> None:
        self._config = config
        self._model = model
        self._workers = workers
        self._stack = ExitStack()
        self._replicas: _Replicas

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, pool: Any) -> RouterAddress:
        """Start the replicas on the GPUs of verl's resource pool, and put them to sleep.

        Args:
            pool: a pool whose GPUs have enough free memory at this moment.

        Returns:
            The address of the router for the reward workers.

        Raises:
            ConfigError, ServerStartError: as `serving.RewardModelManager` does on entry.
        """
        options: Any = OmegaConf.create(OmegaConf.to_container(self._config.reward.reward_model))
        options.nnodes, options.n_gpus_per_node = self._config.trainer.nnodes, self._config.trainer.n_gpus_per_node
        self._replicas = _Replicas(options, pool)
        urls = tuple(f"http://{address}" for address in self._replicas.server_addresses)
        logger.info("the reward model sleeps; its servers: %s", ", ".join(urls))
        servers = {"engine": "external", "urls": urls, "placement": "local"}
        served = self._stack.enter_context(serve_reward_model(self._model.model_copy(update=servers)))
        return self._stack.enter_context(router_address(served.reward_router_address, self._model, self._workers))

    @contextmanager
    def awake(self, metrics: dict[str, float] | None = None) -> Iterator[None]:
        """Wake the model up for the block, and then put it to sleep.

        Args:
            metrics: the seconds of both operations are added here.

        Raises:
            RayActorError: a replica has died.
        """
        metrics = {} if metrics is None else metrics
        with added_seconds("reward_loop/model_wake_s", metrics):
            self._replicas.wake_up()
        # No `finally`: if judging fails, the run and its servers stop.
        yield
        with added_seconds("reward_loop/model_sleep_s", metrics):
            self._replicas.sleep()


class _Replicas(RewardModelManager):
    """verl's replicas of the reward model, without verl's router. They sleep after the start."""

    @overrides(RewardModelManager)
    def _initialize_router(self) -> None:
        self.router_address = None
