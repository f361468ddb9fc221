"""The router: health endpoints, the control plane, and the proxy for all other paths; and its process.

``python -m reward_loop.router.app --options JSON --worker JSON ...`` runs it, as `RewardModelManager` does.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Self

import orjson
import uvloop

from reward_loop._util import web_server
from reward_loop._util.api_keys import api_key_of, has_key
from reward_loop._util.process import exit_with_parent, raise_descriptor_limit
from reward_loop._util.web_server import is_foreign_origin, is_known_host, is_loopback, own_names, url_of
from reward_loop.config import parse
from reward_loop.errors import ConfigError
from reward_loop.router.backend import Backend, check_health
from reward_loop.router.config import API_KEY_VARIABLE, WORKER_API_KEY_VARIABLE, BackendConfig, RouterConfig
from reward_loop.router.control import control_plane
from reward_loop.router.http_server import ClientRequest, HttpServer, WaitsFor
from reward_loop.router.messages import Refusal, find
from reward_loop.router.pool import BackendPool
from reward_loop.router.proxy import Proxy

_HEALTH_PATHS = frozenset({"/health", "/live", "/ready"})
"""Paths for health checks of the router itself; they need no API key."""

_CONTROL_PATHS = frozenset({"/metrics", "/workers", "/workers/hung", "/workers/mark_dead"})

_CONTROL_BODY_BYTES = 1024 * 1024
"""The longest request body of the control plane, in bytes: parsing it blocks the event loop."""


class Router:
    """One address in front of several servers; an :class:`~reward_loop.router.http_server.HttpServer` serves it.

    ========================================= ==============================================================
    Endpoint                                  Effect
    ========================================= ==============================================================
    ``GET /health``, ``GET /ready``           200 while at least one server is usable, else 503
    ``GET /live``                             always 200
    ``GET /metrics``, ``/workers/...``        the control plane, see `control_plane`
    all others                                forwarded to a server by `Proxy`
    ========================================= ==============================================================

    Errors of the router itself have the JSON format of vLLM's errors. Those of all paths are 401 (wrong API key) and
    408 (the body did not arrive before the deadline). Without an API key, the control plane answers requests of web
    pages with 403.

    Create it in a running event loop, and use it as an async context manager: between entry and exit, it checks the
    servers and can be called.

    Args:
        backends: the servers, or their URLs.
        config: options; by default, those of `RouterConfig()`.
        check: see `BackendPool`.
    """

    def __init__(
        self,
        backends: Iterable[str | BackendConfig],
        config: RouterConfig | None = None,
        check: Callable[[Backend], Awaitable[None]] = check_health,
    ) -> None:
        config = config or RouterConfig()
        configs = [BackendConfig(url=backend) if isinstance(backend, str) else backend for backend in backends]
        self.pool = BackendPool(configs, check, config)
        self.proxy = Proxy(self.pool, config)
        self._loop = asyncio.get_running_loop()
        self._timeout_s = config.request_timeout_s
        self._credentials = config.api_key.encode() if config.api_key else None
        self._trusted = frozenset(config.trusted_addresses)
        self._is_open = self._credentials is None and not self._trusted
        self._control = control_plane(self.pool, self.proxy)

    async def __aenter__(self) -> Self:
        await self.pool.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pool.__aexit__()

    async def __call__(self, client: ClientRequest) -> None:
        """Serve one request, within the time limit of a request."""
        # Not `asyncio.timeout`, which takes 3 µs more, a tenth of the router's time for a request.
        timer = self._loop.call_later(self._timeout_s, self._cancel_late, client)
        try:
            if client.path in _HEALTH_PATHS:
                self._answer_health(client)
            elif not self._is_open and not self._is_admitted(client):
                raise Refusal(401, "the API key is missing or wrong: send it as a bearer token")
            elif client.path in _CONTROL_PATHS:
                await self._serve_control_plane(client, timer)
            else:
                await self.proxy(client)
        except Refusal as refusal:
            self._refuse(client, refusal)
        except asyncio.CancelledError:
            if not client.started and (backend := self.pool.find(client.waits_for)):
                self.pool.unanswered(backend)
            if not client.late or client.task.uncancel() > 0:
                raise  # The client disconnected, or the router stops.
            self._refuse(client, self._late(client))
        finally:
            timer.cancel()

    def _cancel_late(self, client: ClientRequest) -> None:
        client.late = True
        client.task.cancel()

    # FastAPI receives only the paths of the control plane: with a catch-all route of FastAPI, a router forwarded
    # 3,428 requests/s, with a plain ASGI app 9,387.
    async def _serve_control_plane(self, client: ClientRequest, timer: asyncio.TimerHandle) -> None:
        self._refuse_web_pages(client)
        body = await client.read_body(_CONTROL_BODY_BYTES)
        timer.cancel()  # Removing a server waits for its requests in flight.
        await self._control(client, body)

    def _is_admitted(self, client: ClientRequest) -> bool:
        """Return whether a request has the API key, or comes from a trusted address."""
        if client.address in self._trusted:
            return True
        if self._credentials is None:
            return False
        return has_key(find(client.headers, b"authorization") or b"", self._credentials)

    def _refuse_web_pages(self, client: ClientRequest) -> None:
        """Refuse a request that a web page may have sent; with an API key, which pages do not have, none is refused."""
        if self._credentials is not None:
            return
        host, origin = (
            b", ".join(value for field, value in client.headers if field == name).decode("latin-1")
            for name in (b"host", b"origin")
        )
        if not is_known_host(host or "localhost", own_names(), any_address=True):
            raise Refusal(403, f"unknown host name {host[:100]!r}: use the IP address of the router, or set an API key")
        if client.method not in ("GET", "HEAD") and is_foreign_origin(origin or None, host):
            raise Refusal(403, "web pages of other servers cannot change the servers of this router")

    def _answer_health(self, client: ClientRequest) -> None:
        if client.method not in ("GET", "HEAD"):
            raise Refusal(405, f"{client.path} takes GET and HEAD", allow="GET, HEAD")
        if client.path != "/live" and not self.pool.usable:
            client.refuse(Refusal(503, "no reward model server is usable", retry_after_s=1))  # It is not logged.
        else:
            client.answer_json(b'{"status":"ok"}')

    def _refuse(self, client: ClientRequest, refusal: Refusal) -> None:
        self.proxy.log.refused_request(client.method, client.path, refusal)
        client.refuse(refusal)

    def _late(self, client: ClientRequest) -> Refusal:
        """Return the error for a request that has passed its deadline."""
        timeout = f"{self._timeout_s:g} s"
        match client.waits_for:
            case WaitsFor.BODY:
                return Refusal(408, f"the body did not arrive within {timeout}", close=True)
            case WaitsFor.SERVER:
                return Refusal(503, f"no reward model server was available for {timeout}: {self.pool.describe()}")
            case url:
                return Refusal(504, f"{url} did not answer within {timeout}, the time limit of a request")


logger = logging.getLogger("reward_loop.router.app")  # also where this module is the program

_SPARE_FILES = 1024
"""File descriptors reserved for idle connections to servers, and the process itself."""


def run_router(backends: list[BackendConfig], config: RouterConfig, listener: socket.socket) -> None:
    """Run the router until SIGTERM or SIGINT.

    Raises:
        ConfigError: any machine can reach the socket, and there is no API key; or a server's URL is the router's.
    """
    if not config.api_key and not config.trusted_addresses and not is_loopback(listener):
        raise ConfigError(
            f"{url_of(listener)} can be reached from other machines: set an API key (the environment variable "
            f"{API_KEY_VARIABLE}), or listen on 127.0.0.1"
        )
    own = url_of(listener)
    if own in [backend.url for backend in backends]:
        raise ConfigError(f"--worker {own}: this is the router itself; name the address of a model server")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Imported objects live until the process exits: exclude them from garbage collection.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(backends, config, listener))


async def _serve(backends: list[BackendConfig], config: RouterConfig, listener: socket.socket) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    # After the signal handlers: a program that has read this line may send SIGTERM at once.
    print(f"router listens on {url_of(listener)}", flush=True)
    async with Router(backends, config) as router:
        server = HttpServer(router, max_connections=_max_connections())
        server.start(listener)
        await stopping.wait()
        logger.info("the router is stopping")
        # The manager stops the servers next, so requests in flight cannot be finished.
        await server.stop()


def _max_connections() -> int | None:
    """Raise the limit on open files as far as allowed; return how many clients it permits, ``None`` for any number.

    Each client has a request in flight at most, with a second connection, to the server. Further clients wait.
    """
    raise_descriptor_limit()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return None
    # A quarter of a low limit: all of it would leave no room for requests.
    return max(1, (files - min(_SPARE_FILES, files // 4)) // 2)


def main() -> int:
    """Run the router as `RewardModelManager` does, until SIGTERM; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m reward_loop.router.app", description=__doc__)
    parser.add_argument("--options", default="{}", metavar="JSON", help="options, as a RouterConfig")
    parser.add_argument(
        "--worker", action="append", default=[], metavar="JSON", help="a server, as a BackendConfig; may be repeated"
    )
    web_server.add_arguments(parser)
    args = parser.parse_args()
    if args.parent_pipe is not None:
        exit_with_parent(args.parent_pipe)  # before any slow work
    try:
        keys = {"api_key": api_key_of(API_KEY_VARIABLE), "worker_api_key": api_key_of(WORKER_API_KEY_VARIABLE)}
        config = parse(RouterConfig, {**orjson.loads(args.options), **keys}, "--options")
        backends = [parse(BackendConfig, orjson.loads(backend), "--worker") for backend in args.worker]
        run_router(backends, config, web_server.listener_of(args))
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
