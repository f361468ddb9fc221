"""The services of a run with rewards: the job's actor, and the servers of the reward model.

A reward model on the trainer's GPUs is verl's own replicas, behind this library's router. It is awake while a batch is
judged. The router has its servers only meanwhile, and drains them before they sleep: SGLang dies if it must sleep while
it computes, and verl's router cannot drain.
"""

from __future__ import annotations

import http.client
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

import ray
from omegaconf import DictConfig
from typing_extensions import override
from verl.experimental.reward_loop import RewardModelManager
from verl.utils.profiler import simple_timer

from reward_loop._util.api_keys import api_key_of
from reward_loop.config import LimitConfig, RewardModelConfig
from reward_loop.errors import ServerError
from reward_loop.limits import REWARD_MODEL
from reward_loop.router.config import API_KEY_VARIABLE, BackendConfig
from reward_loop.serving.manager import serve_reward_model
from reward_loop.serving.models import model_kind
from reward_loop.serving.ray_server import GpuReservation
from reward_loop.verl.options import RewardSettings, read
from reward_loop.verl.run.job import RunningJob
from reward_loop.verl.run.reward_model import verls_options

__all__ = ["ColocatedRewardModel", "RewardServices", "reward_services", "with_limits_of_models"]

logger = logging.getLogger(__name__)

PLACES = 64
"""The number of function calls that ask a replica of a reward model at the same time."""

_IDLE_WITHIN_S = 600.0
"""Seconds within which the requests in flight must end before the model sleeps. Late requests are those of calls that
passed their deadline."""

_ROUTER_PAUSE_S = 0.2
_ROUTER_BACK_WITHIN_S = 600.0
"""Between two attempts to reach the router, which its supervisor restarts if it has died; and the longest time that it
may be away."""


@dataclass(frozen=True, slots=True)
class RewardServices:
    """The settings of rewards, and the services that run."""

    settings: RewardSettings
    job: RunningJob
    """What is true of the whole job."""
    router: str | None = None
    """The ``host:port`` of the router in front of the reward model, if its servers run."""
    colocated: ColocatedRewardModel | None = None
    """The reward model on the trainer's GPUs, which the trainer starts itself."""


@contextmanager
def reward_services(config: DictConfig) -> Iterator[RewardServices]:
    """Start the reward model and the job's actor, and stop them at exit. Call it in the task runner.

    A reward model on the trainer's GPUs is started later, by the trainer, and stopped here.

    Args:
        config: verl's whole configuration, in which `reward_loop.verl.main_ppo.run` has filled in the options.

    Raises:
        ConfigError, ServerStartError: as :class:`RewardModelManager` does on entry.
    """
    settings = read(config)
    with ExitStack() as stack:
        router = colocated = None
        model = settings.model
        if model is not None and model.placement == "colocated":
            colocated = ColocatedRewardModel(config, model, stack)
        elif model is not None:
            model, trusted = reachable(model)
            served = serve_reward_model(model, _reservation(config, model), trusted_addresses=trusted)
            router = stack.enter_context(served).reward_router_address
        if model is not None:
            settings = with_limits_of_models(settings)
        job = RunningJob(settings.options, settings.options.worker_answer_timeout_s)
        stack.callback(job.close)
        yield RewardServices(settings, job, router, colocated)


def with_limits_of_models(settings: RewardSettings) -> RewardSettings:
    """Return the settings with the limits and deadlines of the models that the run serves.

    Each replica has `PLACES` for the function calls that ask a reward model at the same time, or as many as its batch
    has. Otherwise, all rollouts of a batch would ask at once, and wait in the queues of the servers while their
    deadlines run. What the user has set of the limit stays.
    """
    model = settings.model
    assert model is not None
    options = type(settings.options)(**{**dict(settings.options), "models": model.requests()})
    settings = replace(settings, options=options)
    # Without `max_wait`, so that a full judge fails no sample: a call waits while others run, which have deadlines.
    # A worker that is lost gives its permits back (`Job.lose`).
    given = options.limits[REWARD_MODEL].model_dump(exclude_unset=True) if REWARD_MODEL in options.limits else {}
    models = (model, *model.models.values())
    places = sum(
        min(PLACES, one.max_batch_size) * (len(one.urls) or one.replicas * one.data_parallel_size) for one in models
    )
    limit = LimitConfig(**{"max_concurrent": places, "max_wait": None, **given})
    return replace(settings, options=options.model_copy(update={"limits": {**options.limits, REWARD_MODEL: limit}}))


def _reservation(config: DictConfig, model: RewardModelConfig) -> GpuReservation | None:
    if all(one.placement != "ray" for one in (model, *model.models.values())):
        return None
    # verl's trainer reserves its GPUs later, and waits without a timeout until whole nodes are free.
    return GpuReservation(
        groups_of_trainer(config),
        timeout_s=model.placement_timeout_s,
        fix="Lower reward_model.n_gpus_per_node or trainer.n_gpus_per_node, for example to 4 and 4 on one node with 8 "
        "GPUs; or set reward_model.enable_resource_pool=False: the reward model then shares the trainer's GPUs; or add "
        "nodes",
    )


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def worker_nodes(count: int) -> list[str]:
    """Return the Ray node id for each of ``count`` reward workers: this node first, then the others in turn."""
    here = ray.get_runtime_context().get_node_id()
    # As verl does for agent loop workers: not on nodes without CPUs, such as a head node that only coordinates.
    alive = [node["NodeID"] for node in _alive() if node["Resources"].get("CPU", 0) > 0]
    nodes = sorted(alive, key=lambda node: node != here)
    return [nodes[i % len(nodes)] for i in range(count)]


def reachable(model: RewardModelConfig) -> tuple[RewardModelConfig, list[str]]:
    """Make the router reachable for the reward workers of all nodes.

    Returns:
        The options with the address of this node as the router's, if there are several nodes and the user has not
        chosen another; and the addresses whose requests need no API key, because functions for verl send none.
    """
    addresses = [str(node["NodeManagerAddress"]) for node in _alive()]
    if len(addresses) < 2:
        return model, []
    if model.host == RewardModelConfig.model_fields["host"].default:
        model = model.model_copy(update={"host": ray.util.get_node_ip_address()})
    return model, addresses


def groups_of_trainer(config: DictConfig) -> list[int]:
    """Return the GPUs of each placement group that verl's trainer will create, each on one node.

    Args:
        config: verl's whole configuration, after :func:`~reward_loop.verl.options.resolve`.
    """
    groups = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
    if config.trainer.v1.trainer_mode == "separate_async":
        rollout = config.actor_rollout_ref.rollout
        size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
        per_node = min(rollout.n_gpus_per_node, size)
        groups += [per_node] * (rollout.n_gpus_per_node * rollout.nnodes // size * (size // per_node))
    teacher = config.get("distillation")
    if teacher is not None and teacher.enabled:
        groups += [teacher.n_gpus_per_node] * teacher.nnodes
    return [gpus for gpus in groups if gpus]


class ColocatedRewardModel:
    """The reward model that the trainer wakes up and puts to sleep.

    The replicas are Ray actors, which end with the run. A replica that has died ends the run when it should wake up. A
    request that comes too late gets a 503.

    Args:
        config: verl's whole configuration.
        served: the options of the reward model, and of those with another placement.
        stack: stops the router at its exit.
    """

    def __init__(self, config: DictConfig, served: RewardModelConfig, stack: ExitStack) -> None:
        self._config = config
        self._served = served
        self._stack = stack
        self._replicas: RewardModelManager
        self._servers: list[BackendConfig] = []
        self._router = ""
        """The ``host:port`` of the router."""

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
                self._ask_router("POST", "/workers", server.model_dump_json().encode())
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
            self._ask_router("DELETE", f"/workers?{urlencode({'url': server.url})}")

    def _ask_router(self, method: str, path: str, body: bytes | None = None) -> None:
        """Add or remove a server of the router; ask again while the router restarts."""
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
                if status in (404, 409):  # removed already; or added, by a router that was restarted
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
