"""Reward models on the trainer's GPUs: verl's own replicas, which it has run on GPUs, behind this library's router.

One model is awake while a batch is judged. Of several, one at a time is awake: the router names the next one, in the
order in which functions ask for them (:mod:`reward_loop.router.model_turns`).
"""

from __future__ import annotations

import asyncio
import functools
import http.client
import logging
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import aiohttp
from omegaconf import DictConfig
from verl.experimental.reward_loop import RewardModelManager, reward_model

from reward_loop._util.api_keys import api_key_of
from reward_loop.config import RewardModelConfig, ServedModelConfig
from reward_loop.errors import ServerError
from reward_loop.router.config import API_KEY_VARIABLE, BackendConfig
from reward_loop.router.model_turns import SILENT_S
from reward_loop.serving.manager import serve_reward_model
from reward_loop.serving.models import model_kind
from reward_loop.serving.reservation import GpuReservation
from reward_loop.verl.cluster import RouterAddress, accelerator, router_address
from reward_loop.verl.compat import overrides, replaced, uses
from reward_loop.verl.reward_metrics import added_seconds
from reward_loop.verl.reward_model import colocated_models, verls_options

uses(__name__, "verl.experimental.reward_loop:RewardModelManager", "__init__(config, resource_pool)")
uses(__name__, "verl.experimental.reward_loop:RewardModelManager", "server_addresses", "sleep()", "wake_up()")
uses(__name__, "verl.experimental.reward_loop.reward_model", "get_rollout_replica_class(rollout)")

logger = logging.getLogger(__name__)

_IDLE_WITHIN_S = 600.0
"""Seconds within which the requests in flight must end before a model sleeps: SGLang dies if it must sleep while it
computes. Late requests are those of calls that passed their deadline."""

_ROUTER_PAUSE_S = 0.2
_ROUTER_BACK_WITHIN_S = 600.0
"""Between two attempts to reach the router, which its supervisor restarts if it has died; and the longest time that it
may be away."""


class ColocatedRewardModels:
    """Reward models that the trainer wakes up and puts to sleep. A context manager: the router stops at exit.

    The replicas are Ray actors, which end with the run. A replica that has died ends the run when it should wake up.
    The router has the servers of a model only while they are awake. A request that comes too late gets a 503 if there
    is one model; of several, it waits.

    Args:
        config: verl's whole configuration.
        served: the options of the reward models, and of those with another placement.
        workers: the number of reward workers.
    """

    def __init__(self, config: DictConfig, served: RewardModelConfig, workers: int) -> None:
        self._config = config
        self._served = served
        self._workers = workers
        self._stack = ExitStack()
        self._models: dict[str, _Model] = {}
        """The models by the name that requests use."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, pool: Any) -> RouterAddress:
        """Start the replicas on the GPUs of verl's resource pool, one model after the other, and put each to sleep.

        Args:
            pool: a pool whose GPUs have enough free memory at this moment.

        Returns:
            The address of the router for the reward workers.

        Raises:
            ConfigError, ServerStartError: the router, or a server elsewhere, cannot start. Errors of the replicas are
                verl's.
        """
        models, served = colocated_models(self._served), self._served
        several, is_named = len(models) > 1, bool(served.models or served.served_model_name)
        external: dict[str, ServedModelConfig] = {}
        # One after the other: an engine sizes its cache by the GPU memory that is free at its start.
        for name, model in models.items():
            is_first = model is self._served
            replicas = _start(
                verls_options(self._config, model, name if is_named else None), pool, "" if is_first else name
            )
            urls = tuple(f"http://{address}" for address in replicas.server_addresses)
            logger.info("the reward model %s sleeps; its servers: %s", name, ", ".join(urls))
            kind = model.kind if model.kind != "auto" else model_kind(str(model.model_path), "model_path")
            names = (name,) if is_named else ()
            backends = [BackendConfig(url=url, models=names, kind=kind, engine=model.engine) for url in urls]
            self._models[name] = _Model(name, replicas, backends, in_turn=several)
            # For the router, these are servers that run already.
            changes = {"engine": "external", "urls": urls, "placement": "local"}
            if is_first:
                served = served.model_copy(update={**changes, "served_model_name": name if is_named else None})
            else:
                external[name] = model.model_copy(update=changes)
        served = served.model_copy(update={"models": {**served.models, **external}})
        elsewhere = GpuReservation(accelerator=accelerator(), timeout_s=served.placement_timeout_s)
        turns = tuple(models) if several else ()
        router = self._stack.enter_context(serve_reward_model(served, elsewhere, turns=turns)).reward_router_address
        # The router has the servers from its options, and the models sleep.
        for one in self._models.values():
            one.router = router
            one.remove_servers()
        return self._stack.enter_context(router_address(router, self._served, self._workers))

    @contextmanager
    def awake(
        self, metrics: dict[str, float] | None = None
    ) -> Iterator[Callable[[], Coroutine[Any, Any, None]] | None]:
        """Judge in the block: wake the model up, and then put it to sleep.

        Of several models, it wakes up none. The coroutine function that it yields then wakes them up in turn, until it
        is cancelled: all sleep at its end.

        Args:
            metrics: the seconds of both operations are added here, and of several models their number, by model.

        Raises:
            ServerError: the model did not wake up or fall asleep, for example because a replica has died; the router
                does not answer, or requests were in flight for too long.
        """
        metrics = {} if metrics is None else metrics
        if len(self._models) > 1:
            yield functools.partial(self._take_turns, metrics)
            return
        (model,) = self._models.values()
        model.wake_up(metrics)
        # No `finally`: if judging fails, the run and its servers stop.
        yield None
        model.sleep(metrics)

    async def _take_turns(self, metrics: dict[str, float]) -> None:
        """Wake up the models that functions ask for, one after the other, until cancelled; then all sleep."""
        awake: _Model | None = None
        try:
            while True:
                # `None` during the change: a cancellation must not put the model to sleep twice.
                following, before, awake = self._models[await self._next_turn(awake)], awake, None
                if before is not None:
                    await _in_thread(before.sleep, metrics)
                # Before it wakes up: a cancellation waits until it is awake, and then puts it to sleep.
                awake = following
                await _in_thread(awake.wake_up, metrics)
        except asyncio.CancelledError:
            if awake is not None:
                await asyncio.to_thread(awake.sleep, metrics)
            raise

    async def _next_turn(self, awake: _Model | None) -> str:
        """Wait until the router names a model that must wake up, and return its name.

        Raises:
            ServerError: the router does not answer, or no server of the model that is awake is up.
        """
        router = next(iter(self._models.values())).router
        name = awake.name if awake else None
        away_since = answered_at = -math.inf
        # No bound in all: a turn lasts as long as requests come. A router that is frozen sends nothing meanwhile.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENT_S, sock_read=SILENT_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=_authorization()) as session:
            while True:
                try:
                    params = {} if name is None else {"awake": name}
                    async with session.post(f"http://{router}/turns", params=params) as response:
                        answered_at = time.monotonic()
                        answer = await response.json(content_type=None)
                    if isinstance(answer, str):
                        return answer
                    raise ServerError(f"the reward model {name!r} did not wake up: the router answered {answer}")
                except (aiohttp.ClientError, TimeoutError) as error:
                    # Not after each answer: a router that begins to answer and dies, again and again, is away, too.
                    if away_since < answered_at < time.monotonic() - 2 * SILENT_S or away_since == -math.inf:
                        away_since = time.monotonic()
                    if time.monotonic() > away_since + _ROUTER_BACK_WITHIN_S:
                        raise ServerError(f"the router of the reward models at {router} is away: {error!r}") from error
                await asyncio.sleep(_ROUTER_PAUSE_S)
                # A router that was restarted has all servers.
                with suppress(ServerError):
                    await _in_thread(self._register_again, awake)

    def _register_again(self, awake: _Model | None) -> None:
        for model in self._models.values():
            if model is awake:
                model.add_servers()
            else:
                model.remove_servers()


async def _in_thread(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a thread. A cancellation waits until it has returned, since a thread cannot be cancelled."""
    call = asyncio.create_task(asyncio.to_thread(function, *arguments))
    try:
        await asyncio.shield(call)
    except asyncio.CancelledError:
        await call
        raise


class _Model:
    """One model: verl's replicas, and its servers at the router, which has them only while they are awake."""

    def __init__(
        self, name: str, replicas: RewardModelManager, servers: list[BackendConfig], *, in_turn: bool = False
    ) -> None:
        self.name = name
        self._suffixes = ["", f"/{Path(name).name}"] if in_turn else [""]
        """Of the names of metrics."""
        self._in_turn = in_turn
        self.router = ""
        """The ``host:port`` of the router."""
        self._replicas = replicas
        self._servers = servers

    def wake_up(self, metrics: dict[str, float]) -> None:
        """Wake the replicas up, and add the servers to the router; the seconds are added to `metrics`.

        Raises:
            ServerError: a replica did not wake up; or the router does not answer.
        """
        with self._changing("wake up", metrics, "reward_loop/model_wake_s"):
            self._replicas.wake_up()
            self.add_servers()
        if self._in_turn:
            for suffix in self._suffixes:
                name = f"reward_loop/model_wakes{suffix}"
                metrics[name] = metrics.get(name, 0.0) + 1

    def sleep(self, metrics: dict[str, float]) -> None:
        """Remove the servers from the router, and put the replicas to sleep; the seconds are added to `metrics`.

        Raises:
            ServerError: a replica did not fall asleep; the router does not answer, or requests were in flight too long.
        """
        with self._changing("fall asleep", metrics, "reward_loop/model_sleep_s"):
            self.remove_servers()
            self._replicas.sleep()

    @contextmanager
    def _changing(self, what: str, metrics: dict[str, float], seconds: str) -> Iterator[None]:
        with ExitStack() as stack:
            for suffix in self._suffixes:
                stack.enter_context(added_seconds(f"{seconds}{suffix}", metrics))
            try:
                yield
            except ServerError:
                raise
            except Exception as error:
                raise ServerError(f"the reward model {self.name!r} did not {what}: {error!r}") from error

    def add_servers(self) -> None:
        """Add the servers to the router."""
        for server in self._servers:
            # A router that was restarted has the servers already (409).
            self._ask_router("POST", "/workers", server.model_dump_json().encode(), confirmed_by=409)

    def remove_servers(self) -> None:
        """Remove the servers from the router, and wait until their requests in flight have ended."""
        for server in self._servers:
            self._ask_router("DELETE", f"/workers?{urlencode({'url': server.url})}", confirmed_by=404)

    def _ask_router(self, method: str, path: str, body: bytes | None = None, *, confirmed_by: int) -> None:
        """Send a request to the router, again while it restarts.

        ``confirmed_by`` is the error status of a change that was made before.
        """
        headers = {"Content-Type": "application/json", **_authorization()}
        # Blocking: `_take_turns` calls it in threads, and the trainer without an event loop.
        request = urllib.request.Request(f"http://{self.router}{path}", body, headers, method=method)
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
                        f"the router of the reward model {self.name!r} did not confirm {method} {path}: {error!r}"
                    ) from error
            time.sleep(_ROUTER_PAUSE_S)


class _Replicas(RewardModelManager):
    """verl's replicas of the reward model, without verl's router. They sleep after the start."""

    @overrides(RewardModelManager)
    def _initialize_router(self) -> None:
        self.router_address = None


def _start(options: DictConfig, pool: Any, suffix: str) -> _Replicas:
    """Start the replicas of a model; the suffix keeps the names of their Ray actors apart from those of the others."""
    if not suffix:
        return _Replicas(options, pool)
    replica_class = reward_model.get_rollout_replica_class

    def named(*arguments: Any) -> Any:
        return functools.partial(replica_class(*arguments), name_suffix=suffix.replace("/", "_"))

    with replaced(reward_model, "get_rollout_replica_class", named):
        return _Replicas(options, pool)


def _authorization() -> dict[str, str]:
    key = api_key_of(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}
