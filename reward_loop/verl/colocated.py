"""A reward model on the trainer's GPUs: verl's own replicas, which it has run on GPUs, behind this library's router."""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from urllib.parse import urlencode

from omegaconf import DictConfig, OmegaConf
from verl.experimental.reward_loop import RewardModelManager

from reward_loop._util.api_keys import api_key_of
from reward_loop.config import RewardModelConfig
from reward_loop.errors import ServerError
from reward_loop.router.config import API_KEY_VARIABLE, BackendConfig
from reward_loop.serving.manager import serve_reward_model
from reward_loop.serving.models import model_kind
from reward_loop.verl.cluster import RouterAddress, router_address
from reward_loop.verl.compat import overrides, uses
from reward_loop.verl.reward_metrics import added_seconds

__all__ = ["ColocatedRewardModel"]

uses(__name__, "verl.experimental.reward_loop:RewardModelManager", "__init__(config, resource_pool)")
uses(__name__, "verl.experimental.reward_loop:RewardModelManager", "server_addresses", "sleep()", "wake_up()")

logger = logging.getLogger(__name__)

_IDLE_WITHIN_S = 600.0
"""Seconds within which the requests in flight must end before the model sleeps: SGLang dies if it must sleep while it
computes. Late requests are those of calls that passed their deadline."""


class ColocatedRewardModel:
    """A reward model that the trainer wakes up and puts to sleep. A context manager: the router stops at exit.

    The replicas are Ray actors, which end with the run. A replica that has died ends the run when it should wake up.
    The router has servers only while they are awake: a request that comes too late gets a 503.

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
        self._router = ""
        self._servers: list[BackendConfig] = []

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
            ConfigError, ServerStartError: the router cannot start. Errors of the replicas are verl's.
        """
        reward = self._config.reward
        options: Any = OmegaConf.create(OmegaConf.to_container(reward.reward_model, resolve=True))
        options.nnodes, options.n_gpus_per_node = self._config.trainer.nnodes, self._config.trainer.n_gpus_per_node
        if options.rollout.full_determinism and reward.custom_reward_function.path is None:
            options.rollout.max_num_seqs = 1  # as verl does: batches of /classify are not reproducible
        self._replicas = _Replicas(options, pool)
        urls = tuple(f"http://{address}" for address in self._replicas.server_addresses)
        logger.info("the reward model sleeps; its servers: %s", ", ".join(urls))
        # For the router, these are servers that run already.
        servers = {"engine": "external", "urls": urls, "placement": "local"}
        served = self._stack.enter_context(serve_reward_model(self._model.model_copy(update=servers)))
        self._router = served.reward_router_address
        kind = self._model.kind if self._model.kind != "auto" else model_kind(str(self._model.model_path), "model_path")
        self._servers = [BackendConfig(url=url, kind=kind, engine=self._model.engine) for url in urls]
        self._remove_servers()
        return self._stack.enter_context(router_address(self._router, self._model, self._workers))

    @contextmanager
    def awake(self, metrics: dict[str, float] | None = None) -> Iterator[None]:
        """Wake the model up for the block, and then put it to sleep.

        Args:
            metrics: the seconds of both operations are added here.

        Raises:
            RayActorError: a replica has died.
            ServerError: the router does not answer, or requests were in flight for too long.
        """
        metrics = {} if metrics is None else metrics
        with added_seconds("reward_loop/model_wake_s", metrics):
            self._replicas.wake_up()
            for server in self._servers:
                # A router that was restarted has the servers already (409).
                self._ask_router("POST", "/workers", server.model_dump_json().encode(), confirmed_by=409)
        # No `finally`: if judging fails, the run and its servers stop.
        yield
        with added_seconds("reward_loop/model_sleep_s", metrics):
            self._remove_servers()
            self._replicas.sleep()

    def _remove_servers(self) -> None:
        """Remove the servers from the router, and wait until their requests in flight have ended."""
        for server in self._servers:
            self._ask_router("DELETE", f"/workers?{urlencode({'url': server.url})}", confirmed_by=404)

    def _ask_router(self, method: str, path: str, body: bytes | None = None, *, confirmed_by: int) -> None:
        """Send a request to the router. ``confirmed_by`` is the error status of a change that was made before."""
        headers = {"Content-Type": "application/json"}
        if key := api_key_of(API_KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"http://{self._router}{path}", body, headers, method=method)
        without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            without_proxy.open(request, timeout=_IDLE_WITHIN_S).close()
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == confirmed_by:
                return
            raise ServerError(f"the router of the reward model did not confirm {method} {path}: {error!r}") from error


class _Replicas(RewardModelManager):
    """verl's replicas of the reward model, without verl's router. They sleep after the start."""

    @overrides(RewardModelManager)
    def _initialize_router(self) -> None:
        self.router_address = None
