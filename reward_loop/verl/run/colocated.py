"""A reward model on the trainer's GPUs: verl's own replicas, behind this library's router.

The model is awake while a batch is judged. The router has its servers only meanwhile, and drains them before they
sleep: SGLang dies if it must sleep while it computes, and verl's router cannot drain.
"""

from __future__ import annotations

import http.client
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from urllib.parse import urlencode

from omegaconf import DictConfig
from typing_extensions import override
from verl.experimental.reward_loop import RewardModelManager
from verl.utils.profiler import simple_timer

from reward_loop._util.api_keys import api_key_of
from reward_loop.config import RewardModelConfig
from reward_loop.errors import ServerError
from reward_loop.router.config import API_KEY_VARIABLE, BackendConfig
from reward_loop.serving.manager import serve_reward_model
from reward_loop.serving.models import model_kind
from reward_loop.verl.run.reward_model import verls_options
from reward_loop.verl.run.services import reachable

logger = logging.getLogger(__name__)

_IDLE_WITHIN_S = 600.0
"""Seconds within which the requests in flight must end before the model sleeps. Late requests are those of calls that
passed their deadline."""

_ROUTER_PAUSE_S = 0.2
_ROUTER_BACK_WITHIN_S = 600.0
"""Between two attempts to reach the router, which its supervisor restarts if it has died; and the longest time that it
may be away."""


class ColocatedRewardModel:
    """The reward model that the trainer wakes up and puts to sleep. A context manager: the router stops at exit.

    The replicas are Ray actors, which end with the run. A replica that has died ends the run when it should wake up. A
    request that comes too late gets a 503.

    Args:
        config: verl's whole configuration.
        served: the options of the reward model, and of those with another placement.
    """

    def __init__(self, config: DictConfig, served: RewardModelConfig) -> None:
        self._config = config
        self._served = served
        self._stack = ExitStack()
        self._replicas: RewardModelManager
        self._servers: list[BackendConfig] = []
        self._router = ""
        """The ``host:port`` of the router."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, pool: Any) -> str:
        """Start the replicas on the GPUs of verl's resource pool, and put them to sleep.

        Args:
            pool: a pool whose GPUs have enough free memory at this moment.

        Returns:
            The ``host:port`` of the router.

        Raises:
            ConfigError, ServerStartError: the router, or a server elsewhere, cannot start. Errors of the replicas are
                verl's.
        """
        served = self._served
        name = served.served_model_name or (str(served.model_path) if served.models else None)
        self._replicas = _Replicas(verls_options(self._config, name), pool)
        urls = tuple(f"http://{address}" for address in self._replicas.server_addresses)
        logger.info("the reward model sleeps; its servers: %s", ", ".join(urls))
        kind = served.kind if served.kind != "auto" else model_kind(str(served.model_path), "model_path")
        names = () if name is None else (name,)
        self._servers = [BackendConfig(url=url, models=names, kind=kind, engine=served.engine) for url in urls]
        # For the router, these are servers that run already.
        changes = {"engine": "external", "urls": urls, "placement": "local", "served_model_name": name}
        model, trusted = reachable(served.model_copy(update=changes))
        self._router = self._stack.enter_context(
            serve_reward_model(model, trusted_addresses=trusted)
        ).reward_router_address
        self._remove_servers()  # the router has them from its options
        return self._router

    @contextmanager
    def awake(self, metrics: dict[str, float] | None = None) -> Iterator[None]:
        """Judge in the block: wake the model up, and then put it to sleep.

        Args:
            metrics: the seconds of both operations are added here.

        Raises:
            ServerError: the model did not wake up or fall asleep, for example because a replica has died; the router
                does not answer, or requests were in flight for too long.
        """
        metrics = {} if metrics is None else metrics
        with self._changing("wake up", metrics, "reward_loop/model_wake_s"):
            self._replicas.wake_up()
            for server in self._servers:
                # A router that was restarted has the servers already (409).
                self._ask_router("POST", "/workers", server.model_dump_json().encode(), confirmed_by=409)
        # No `finally`: if judging fails, the run and its servers stop.
        yield
        with self._changing("fall asleep", metrics, "reward_loop/model_sleep_s"):
            self._remove_servers()
            self._replicas.sleep()

    @contextmanager
    def _changing(self, what: str, metrics: dict[str, float], seconds: str) -> Iterator[None]:
        with simple_timer(seconds, metrics):
            try:
                yield
            except ServerError:
                raise
            except Exception as error:
                raise ServerError(f"the reward model did not {what}: {error!r}") from error

    def _remove_servers(self) -> None:
        """Remove the servers from the router, and wait until their requests in flight have ended."""
        for server in self._servers:
            self._ask_router("DELETE", f"/workers?{urlencode({'url': server.url})}", confirmed_by=404)

    def _ask_router(self, method: str, path: str, body: bytes | None = None, *, confirmed_by: int) -> None:
        """Send a request to the router, again while it restarts.

        ``confirmed_by`` is the error status of a change that was made before.
        """
        key = api_key_of(API_KEY_VARIABLE)
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        # Blocking: the trainer has no event loop.
        request = urllib.request.Request(f"http://{self._router}{path}", body, headers, method=method)
        # The router is on this machine, which the proxy of the environment may not reach.
        without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        until = time.monotonic() + _ROUTER_BACK_WITHIN_S
        while True:
            try:
                without_proxy.open(request, timeout=_IDLE_WITHIN_S).close()
                return
            except (OSError, http.client.HTTPException) as error:
                status = error.code if isinstance(error, urllib.error.HTTPError) else None
                if status == confirmed_by:
                    return
                if status is not None or time.monotonic() > until:
                    raise ServerError(
                        f"the router of the reward model did not confirm {method} {path}: {error!r}"
                    ) from error
            time.sleep(_ROUTER_PAUSE_S)


class _Replicas(RewardModelManager):
    """verl's replicas of the reward model, without verl's router. They sleep after the start."""

    @override
    def _initialize_router(self) -> None:
        self.router_address = None
