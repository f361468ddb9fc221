"""The servers behind the router: their states, their health checks, and the choice of a server for each request.

A server is *up*, and receives requests, from a successful health check until failed requests or checks take it out of
use (`mark_unhealthy`). Requests wait while all servers that could answer them are down.

Invariants:

- Only `BackendPool` changes `Backend.up`. The proxy and the owner of the servers report what they see.
- Each server has a task that checks its health, until it is removed.
- Every change of `up` or of the models ends with `_refresh`, which drops the cached groups and wakes all waiters of
  `acquire`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable
from typing import Any, Self

import orjson

from reward_loop._util.retry_after import Backoff
from reward_loop._util.transient import RouterCode
from reward_loop.errors import ServerError
from reward_loop.router.backend import (
    ANY,
    AsleepError,
    Backend,
    Route,
    ask_for_one_token,
    update_models,
)
from reward_loop.router.config import BackendConfig, Kind, RouterConfig
from reward_loop.router.http_client import ConnectError, MovedError, Upstream, UpstreamError
from reward_loop.router.messages import LimitedLog, Refusal
from reward_loop.router.policies import Key, Policy, policy_for

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
"""The pause before the second health check of a server that is down, in seconds; later ones double."""
_LONGEST_PAUSE_S = 5.0

_ASK_INTERVAL_S = 1.0
"""The least time between two questions to all servers for their models, in seconds: clients may repeat a wrong name."""

_UNANSWERED = 3
"""A server that has answered nothing to this number of requests in a row, until their deadlines, is asked for one
token. An overloaded server answers some of them."""

_ONE_TOKEN_S = 30.0
"""The timeout of a request of one token, in seconds, unless `request_timeout_s` is shorter. A server that sends nothing
until then is hung."""

_MAX_FAILURES = 5
"""After this number of 5xx answers in a row, a server is taken out of use until a health check succeeds."""

_LOG_INTERVAL_S = 30.0
"""Seconds between two log lines about a server that stays unhealthy for the same reason."""


class BackendGroup:
    """The servers that can answer the requests of a route, with the policy that chooses among them."""

    def __init__(self, members: list[Backend], policy: Policy) -> None:
        self.members = members
        self.policy = policy
        self.ready = [backend for backend in members if backend.up]
        self.empty_text_can_crash = any(
            backend.config.engine == "sglang" and backend.config.kind == "discriminative" for backend in members
        )
        """Whether an empty text can crash a server."""


class BackendPool:
    """Chooses servers for requests, and takes failing servers out of use until they are healthy again.

    Use it as an async context manager. Between entry and exit, it checks servers that are down with exponential
    backoff, and servers in use every `health_interval_s` seconds.

    Args:
        backends: the servers.
        check: sends a health request to a server, and raises an exception if the server is unhealthy. It may set the
            backend's `models`.
        config: options.
    """

    def __init__(
        self,
        backends: Iterable[BackendConfig],
        check: Callable[[Backend], Awaitable[None]],
        config: RouterConfig | None = None,
    ) -> None:
        self.config = config or RouterConfig()
        self.check = check
        self.backends: list[Backend] = []
        self.models: frozenset[str] = frozenset()
        """The names of all known models."""
        self.several_models = False
        """Whether the servers serve different models, so that requests are routed by their ``model`` field."""
        self._initial = list(backends)
        self._groups: dict[Route, BackendGroup] = {}
        # One policy for each group: with a shared round robin, requests that alternate between two models would each
        # reach only every second server.
        self._policies: defaultdict[Route, Policy] = defaultdict(lambda: policy_for(self.config.policy))
        self._log = LimitedLog(logger, _LOG_INTERVAL_S)
        self._shared: dict[object, asyncio.Task[Any]] = {}
        """Work that several requests await, by its key: see `_share`."""
        self._asked_at = -_ASK_INTERVAL_S
        self._changed = asyncio.Event()
        self._watches: dict[Backend, asyncio.Task[None]] = {}
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for config in self._initial:
            self.add(config)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in [*self._watches.values(), *self._shared.values()]:
            task.cancel()
        # Without an exception of the block, which the task group would wrap in an ExceptionGroup.
        await self._tasks.__aexit__(None, None, None)
        for backend in self.backends:
            backend.upstream.close()

    @property
    def usable(self) -> bool:
        """Whether at least one server is up."""
        return any(backend.up for backend in self.backends)

    def group(self, route: Route = ANY) -> BackendGroup:
        """Return the servers that can answer the requests of a route."""
        if route.model is not None and route.model not in self.models:
            route = route._replace(model="")  # All unknown names share one group: the servers whose models are unknown.
        group = self._groups.get(route)
        if group is None:
            members = [backend for backend in self.backends if backend.can_answer(route)]
            # The policy outlives the cached group: it remembers whose turn it is, or which server has which prompts.
            group = self._groups[route] = BackendGroup(members, self._policies[route])
        return group

    def pick(self, route: Route = ANY, key: Key | None = None, avoid: Container[Backend] = ()) -> Backend | None:
        """Return a server that is available now, or ``None``; for arguments, see `acquire`."""
        group = self.group(route)
        if avoid and (others := [backend for backend in group.ready if backend not in avoid]):
            # Without a turn of the policy: of two servers, the failing one would get the next turn again.
            return min(others, key=lambda backend: backend.in_flight)
        return group.policy.choose(group.ready, key) if group.ready else None

    def has_other(self, route: Route, avoid: Container[Backend]) -> bool:
        """Return whether a server that is not in `avoid` is available now."""
        return any(backend not in avoid for backend in self.group(route).ready)

    async def acquire(
        self, route: Route = ANY, key: Key | None = None, avoid: Container[Backend] = (), *, wait: bool = True
    ) -> Backend:
        """Return a server for a request; wait while all servers are down.

        Args:
            route: which servers can answer the request.
            key: the routing key of the request; see `Policy.key`.
            avoid: servers to choose only if no other server is available.
            wait: whether to wait.

        Raises:
            Refusal: 503 if all servers are removed, or if all are down and the request must not wait.
        """
        while not (backend := self.pick(route, key, avoid)):
            members = self.group(route).members
            if not members or not wait:
                message = f"no reward model server is up: {self.describe(members)}"
                raise Refusal(503, message, code=RouterCode.NO_SERVER_UP)
            await self._changed.wait()
        return backend

    async def ask_for_model(self, name: str) -> None:
        """Ask the servers in use for their models again, because a request names a model that its server does not have.

        Adapters can be loaded while a server runs. Requests that come while the servers are asked wait for the same
        answers; after them, no server is asked for `_ASK_INTERVAL_S` seconds.
        """
        if "models" in self._shared or time.monotonic() >= self._asked_at + _ASK_INTERVAL_S:
            await self._share("models", lambda: self._ask(name))

    async def _ask(self, name: str) -> None:
        in_use = [backend for backend in self.backends if backend.up]
        try:
            async with asyncio.timeout(self.config.health_timeout_s):
                await asyncio.gather(*(update_models(backend, name) for backend in in_use), return_exceptions=True)
        except TimeoutError:
            logger.warning("not all servers listed their models within %g s", self.config.health_timeout_s)
        finally:
            self._asked_at = time.monotonic()
            self._refresh()

    async def _share(self, key: object, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Await the work with a key, which other requests may await, too. It is started unless it is running."""
        # Shielded: the cancellation of one request must not end the work that others await.
        await asyncio.shield(self._started(key, work))

    def _started(self, key: object, work: Callable[[], Coroutine[Any, Any, object]]) -> asyncio.Task[Any]:
        if key not in self._shared:
            self._shared[key] = self._tasks.create_task(work())
            self._shared[key].add_done_callback(lambda _: self._shared.pop(key))
        return self._shared[key]

    # State changes

    def succeeded(self, backend: Backend) -> None:
        """Record an answer that is not a retryable error."""
        backend.failures = 0
        backend.outages = 0

    def failed(self, backend: Backend, reason: str) -> None:
        """Record a 5xx answer; take the server out of use after `_MAX_FAILURES` in a row.

        After an outage, one failure is enough until a request succeeds.
        """
        backend.failures += 1
        if backend.failures >= _MAX_FAILURES or backend.outages:
            self.mark_unhealthy(backend, f"{backend.failures} failures in a row, the last one: {reason}")

    def mark_unhealthy(self, backend: Backend, reason: str) -> None:
        """Take a server in use out of use until a health check succeeds."""
        if backend.up:
            logger.warning("server %s is down: %s", backend.url, reason)
            backend.outages += 1
            backend.failures = 0
            backend.last_error = reason
            backend.ejections += 1
            self._set_up(backend, False)
            backend.taken_out.set()

    def mark_dead(self, backend: Backend, reason: str) -> None:
        """Take a server out of use because its process has died, and fail its unanswered requests for a retry.

        Without this call, a connection that the dead process had not accepted would stay open and wait for the next
        process on the same socket.

        Args:
            backend: the server.
            reason: why it died, for messages.
        """
        self.mark_unhealthy(backend, reason)
        backend.hung = False  # The next process starts fresh: it need not answer with a token.
        backend.died_at = time.monotonic()
        backend.last_error = reason
        backend.upstream.break_off(reason)

    async def has_died(self, backend: Backend, began: float, ended: float) -> bool:
        """Return whether a server has died since a request began there; a reset connection alone is not a death.

        A health check decides, unless one has been made after the end of the request.

        Args:
            backend: the server.
            began: the beginning of the request, in seconds of `time.monotonic`.
            ended: its end, the same.
        """
        if backend.died_at < began and backend.healthy_at < ended:
            # It sets `healthy_at` or `died_at`. All requests that the server broke await one check.
            await self._share(backend, lambda: self._failure(backend))
        return backend.died_at >= began

    def find(self, url: str) -> Backend | None:
        """Return the server with this URL, or ``None``."""
        url = url.rstrip("/")
        return next((backend for backend in self.backends if backend.url == url), None)

    def add(self, config: BackendConfig) -> Backend:
        """Add a server; it receives requests after its first successful health check."""
        backend = Backend(config, Upstream(config.url, api_key=self.config.worker_api_key))
        self.backends.append(backend)
        self._watches[backend] = self._tasks.create_task(self._watch(backend), name=f"watch-{backend.url}")
        self._refresh()
        return backend

    async def remove(self, backend: Backend) -> None:
        """Remove a server, and wait until its requests in flight end."""
        logger.info("server %s is removed, with %d requests in flight", backend.url, backend.in_flight)
        self.backends.remove(backend)
        self._watches.pop(backend).cancel()
        self._set_up(backend, False)
        backend.idle.clear()
        if backend.in_flight:
            await backend.idle.wait()

    def describe(self, backends: Iterable[Backend] | None = None) -> str:
        """Return a text for messages: the URL, state and last error of each server (by default, of all servers)."""
        described = [
            f"{backend.url} is {backend.state}" + (f" ({backend.last_error})" if backend.last_error else "")
            for backend in (self.backends if backends is None else backends)
        ]
        return "; ".join(described) or "no server is configured"

    def _set_up(self, backend: Backend, up: bool) -> None:
        backend.up = up
        self._refresh()

    def _refresh(self) -> None:
        """Update the known models, drop the cached groups, and wake all waiters of `acquire`."""
        named = {frozenset(backend.models) for backend in self.backends if backend.models}
        self.models = frozenset().union(*named)
        self.several_models = len(named) > 1
        self._groups.clear()
        self._changed.set()
        self._changed = asyncio.Event()

    # Health

    async def _watch(self, backend: Backend) -> None:
        """Check a server until the task is cancelled: every `health_interval_s` seconds in use, else with backoff."""
        while True:
            await self._readmit(backend)
            backend.taken_out.clear()
            while backend.up:
                with contextlib.suppress(TimeoutError):
                    # In Python 3.11, wait_for loses a cancellation that coincides with the event.
                    async with asyncio.timeout(self.config.health_interval_s):
                        await backend.taken_out.wait()
                while backend.up and await self._check_in_use(backend):
                    pass  # The check timed out, which took long enough: repeat it without a pause.

    async def _readmit(self, backend: Backend) -> None:
        """Repeat the health check of a server that is down until it succeeds, and take the server into use."""
        first_pause = _FIRST_PAUSE_S
        # It was healthy in between, and no request succeeded: readmitted at once, it would fail further ones.
        if backend.outages > 1:
            first_pause = min(_FIRST_PAUSE_S * 2 ** (backend.outages - 1), _LONGEST_PAUSE_S)
            await asyncio.sleep(first_pause)
        pauses = Backoff(first_pause, _LONGEST_PAUSE_S)
        while failure := await self._failure(backend):
            backend.last_error = _reason(failure)
            self._log.warning(backend.last_error, "server %s is not healthy: %s", backend.url, backend.last_error)
            if isinstance(failure, TimeoutError):
                self._move_requests(backend)  # again: another server may be healthy now
            else:
                await asyncio.sleep(pauses.next_s())
        logger.info("server %s is up", backend.url)
        backend.last_error = None
        backend.failed_checks = 0
        backend.hung = False
        self._set_up(backend, True)

    async def _check_in_use(self, backend: Backend) -> bool:
        """Check a server in use; return whether the check timed out, and the server sent no bytes during it."""
        failure = await self._failure(backend)
        if failure is None or isinstance(failure, BusyError):
            backend.failed_checks = 0
            return False
        backend.failed_checks += 1
        timed_out = isinstance(failure, TimeoutError)
        # These leave no doubt. A busy server may miss a check, or answer it with an error.
        certain = isinstance(failure, ConnectError | AsleepError)
        if certain or backend.failed_checks >= self.config.max_failed_checks:
            self.mark_unhealthy(backend, _reason(failure))
            if timed_out:
                self._move_requests(backend)
        return timed_out

    def _move_requests(self, backend: Backend) -> None:
        """Retry the unanswered requests of a frozen server on others, if one with the same models and kind is up."""
        if any(
            other.up and set(other.models) == set(backend.models) and other.config.kind == backend.config.kind
            for other in self.backends
        ):
            backend.upstream.break_off("the server is frozen: its health checks time out", MovedError)

    def unanswered(self, backend: Backend) -> None:
        """Record that a request had no answer when its deadline passed, or its client left.

        After `_UNANSWERED` in a row, the server is asked for one token; if it sends nothing, it is hung.
        """
        if backend.upstream.reads != backend.silent_reads:
            backend.silent_reads, backend.unanswered = backend.upstream.reads, 0
        backend.unanswered += 1
        if backend.unanswered >= _UNANSWERED and backend.up:
            self._started(("engine", backend), lambda: self._check_engine(backend))

    async def _check_engine(self, backend: Backend) -> None:
        """Ask a server in use for one token; if it sends nothing, take it out of use until its owner restarts it."""
        reads = backend.upstream.reads
        try:
            async with asyncio.timeout(min(_ONE_TOKEN_S, self.config.request_timeout_s)):
                await ask_for_one_token(backend)
        except TimeoutError:
            if backend.upstream.reads == reads:
                self.mark_unhealthy(
                    backend,
                    f"hung: it answered none of {backend.unanswered} requests in a row until their deadlines, and then "
                    "no request of one token",
                )
                backend.hung = True
                self._refresh()
                self._move_requests(backend)
        except UpstreamError:
            pass  # the health checks find the cause
        backend.unanswered = 0

    async def next_hung(self) -> list[str]:
        """Wait until a server is hung; return the URLs of all hung servers for their owner, who restarts them."""
        while not (hung := [backend.url for backend in self.backends if backend.hung]):
            await self._changed.wait()
        return hung

    async def _failure(self, backend: Backend) -> Exception | None:
        """Check a server; return ``None`` if it is healthy, and a `TimeoutError` if it sent nothing in time."""
        began, reads = time.monotonic(), backend.upstream.reads
        try:
            async with asyncio.timeout(self.config.health_timeout_s):
                await self.check(backend)
                if backend.hung:
                    await ask_for_one_token(backend)
        except TimeoutError:
            message = f"no answer to a health check within {self.config.health_timeout_s:g} s"
            return TimeoutError(message) if backend.upstream.reads == reads else BusyError(message)
        except Exception as error:
            # Not after a timeout: a busy server does not answer in time either, and has not died.
            backend.died_at = time.monotonic()
            return error
        # Not the end of the check: only one that began after a broken connection shows that the server still lives.
        backend.healthy_at = began
        return None


class BusyError(ServerError):
    """A server did not answer a health check in time, but requests: it is busy, not frozen."""


def _reason(failure: Exception) -> str:
    return str(failure) if isinstance(failure, TimeoutError) else f"{type(failure).__name__}: {failure}"


_KIND_OF_PATH: dict[str, Kind] = {
    "/v1/chat/completions": "generative",
    "/v1/completions": "generative",
    "/v1/responses": "generative",
    "/v1/messages": "generative",
    "/generate": "generative",
    "/classify": "discriminative",
    "/v1/classify": "discriminative",
    "/pooling": "discriminative",
    "/v1/pooling": "discriminative",
    "/score": "discriminative",
    "/rerank": "discriminative",
    "/v2/rerank": "discriminative",
    "/v1/embeddings": "discriminative",
}
"""The kind of request for each known path. Requests with other paths go to any server."""

# Generative SGLang servers answer the last two, too.
_NEEDS_MODEL = frozenset({*_KIND_OF_PATH, "/v1/score", "/v1/rerank"})
"""The paths whose requests must name the model if there are several: another one would answer with other scores."""

_ROUTE_OF_PATH = {path: Route(kind=kind) for path, kind in _KIND_OF_PATH.items()}

_TEXT_FIELDS = ("text", "input", "input_ids")


class UnknownModelError(Refusal):
    """No server has the model of a request."""

    def __init__(self, model: str, available: str) -> None:
        super().__init__(404, f"the model {model!r} does not exist; available models: {available}", param="model")
        self.model = model


def model_of(body: bytes) -> str | None:
    """Return the model that a request names; ``None`` if it names none."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    model = fields.get("model") if isinstance(fields, dict) else None
    return model if isinstance(model, str) else None


def route(pool: BackendPool, path: str, body: bytes) -> Route:
    """Return the route of a request.

    The body is parsed only if servers have different models, or if the group contains a server that an empty text can
    crash.

    Raises:
        Refusal: no server can answer the request.
    """
    destination = _ROUTE_OF_PATH.get(path, ANY)
    kind = destination.kind
    group = pool.group(destination)
    if not group.members:
        if not pool.backends:
            raise Refusal(503, "the router has no reward model server")
        raise Refusal(400, f"{path} needs a {kind} server; available: {_served(pool)}")
    # A long prompt takes longer to parse than all else that the router does with a request.
    if body and (pool.several_models or (group.empty_text_can_crash and kind == "discriminative")):
        return _route_by_body(pool, path, kind, body)
    return destination


def _route_by_body(pool: BackendPool, path: str, kind: Kind | None, body: bytes) -> Route:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # A path that the router does not know may have any body; the server decides.
        if path not in _NEEDS_MODEL:
            return ANY
        # Refused here: the request could reach a server of another model, or crash one.
        raise Refusal(400, f"the body is not JSON: {error}") from None
    model = fields.get("model") if isinstance(fields, dict) else None
    if not isinstance(model, str):
        model = None
    if pool.several_models:
        if model is None and path in _NEEDS_MODEL:
            raise Refusal(400, f"the field 'model' is missing; available models: {_names(pool)}", param="model")
        if model is not None and not pool.group(Route(model)).members:
            raise UnknownModelError(model, _names(pool))
    else:
        # Servers that all have the same models answer for a wrong name themselves.
        model = None
    destination = Route(model, kind)
    group = pool.group(destination)
    if not group.members:
        raise Refusal(400, f"{path} needs a {kind} server, which {model!r} is not; available: {_served(pool)}")
    if group.empty_text_can_crash and kind == "discriminative" and _has_empty_text(fields):
        raise Refusal(400, "the text is empty, which can crash the SGLang server")
    return destination


def _has_empty_text(fields: Any) -> bool:
    if not isinstance(fields, dict):
        return False
    for name in _TEXT_FIELDS:
        text = fields.get(name)
        if text == "" or (isinstance(text, list) and (not text or "" in text or [] in text)):
            return True
    return False


def _names(pool: BackendPool) -> str:
    return ", ".join(sorted(pool.models))


def _served(pool: BackendPool) -> str:
    return "; ".join(
        f"{', '.join(backend.models) or backend.url} ({backend.config.kind or 'of unknown kind'})"
        for backend in pool.backends
    )
