"""What the library's servers share: listening sockets, options, serving until a signal, disconnects, foreign web pages.

No other module below the satellites opens a listening socket.
"""

from __future__ import annotations

import argparse
import functools
import ipaddress
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import anyio

from reward_loop._util.api_keys import api_key_of
from reward_loop._util.signals import end_at_once
from reward_loop.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn

_KEEP_ALIVE_S = 75
"""Idle connections are closed after this time, in seconds. It is longer than clients keep them, so that the client
closes them, not the server."""

_DEAD_AFTER_S = 120
"""The kernel closes connections to machines that do not answer any more after this time, in seconds."""

_SAME_S = 1.0
"""After a signal, further signals are ignored for this time in seconds: launchers may send several at once."""


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a listening TCP socket on ``host``; with port 0, the kernel chooses a free port.

    Raises:
        OSError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Thousands of samples may connect at once. Beyond the backlog, the kernel drops connections, and clients try again
    # after seconds.
    listener = socket.create_server((host, port), family=family, backlog=4096)
    # Accepted connections inherit these: a client whose machine dies would keep its connection and file descriptor.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_AFTER_S // 2)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _DEAD_AFTER_S // 10)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
    return listener


def reserve(host: str) -> socket.socket:
    """Return a socket that reserves a free port of ``host`` for a program that binds the port itself.

    While the socket, which never listens, is open, the kernel does not assign its port to programs that ask for any
    free port. A program that binds it by number, with ``SO_REUSEADDR`` or ``SO_REUSEPORT`` as servers do, can listen.

    Raises:
        OSError: no port of the host can be bound.
    """
    reservation = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind((host, 0))
    except OSError:
        reservation.close()
        raise
    return reservation


def url_of(listener: socket.socket) -> str:
    """Return the URL of a bound socket, ``http://host:port``."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Return whether the socket can be reached from this machine only."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options ``--fd``, ``--host``, ``--port`` and ``--parent-pipe``, see `ParentDeathPipe`."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--fd", type=int, metavar="N", help="an inherited listening socket, instead of host and port")
    parser.add_argument(
        "--parent-pipe",
        type=int,
        metavar="N",
        help="file descriptor of an inherited pipe; this process exits when the parent closes it or dies",
    )


def listener_of(args: argparse.Namespace) -> socket.socket:
    """Return the listening socket that the options describe.

    Raises:
        SystemExit: the address cannot be bound; the message names it.
    """
    try:
        return listen(args.host, args.port) if args.fd is None else socket.socket(fileno=args.fd)
    except OSError as error:
        raise SystemExit(f"error: --host {args.host} --port {args.port}: {error.strerror or error}") from None


def _uvicorn_config(app: Any, *, grace_s: int, **options: Any) -> uvicorn.Config:
    """Return the configuration of a server for an ASGI app that supports the lifespan protocol.

    When the server stops, requests in flight have ``grace_s`` seconds to end; then they are cancelled.
    """
    import uvicorn  # takes 0.2 s

    return uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        # By default, uvicorn would take an app whose start-up fails for an app without lifespan, and serve it.
        lifespan="on",
        ws="none",
        access_log=False,
        proxy_headers=False,
        # The router forwards the header `Server` of the backends.
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace_s,
        **options,
    )


def serve(app: Any, args: argparse.Namespace, name: str) -> None:
    """Serve an ASGI app until SIGTERM or SIGINT, then finish the requests in flight.

    Args:
        app: the app.
        args: the options.
        name: the name of the server in the line that announces its address.

    Raises:
        SystemExit: the address cannot be bound, or the app failed to start; the log shows the cause.
    """
    import uvicorn  # takes 0.2 s, and the router, which has its own server, must start fast

    listener = listener_of(args)
    print(f"{name} listens on {url_of(listener)}", flush=True)
    # The router forwards the header `Date` of the backends.
    server = uvicorn.Server(_uvicorn_config(app, grace_s=5, date_header=False, backlog=4096))
    server.run(sockets=[listener])
    if not server.started:  # Newer versions of uvicorn raise SystemExit themselves.
        raise SystemExit(f"error: {name} failed to start")


def api_key(variable: str | None) -> str | None:
    """Return the API key in an environment variable, the value of ``--api-key-env``; ``None`` without the option.

    Raises:
        ConfigError: the variable is not set, or does not contain a valid key.
    """
    if variable is None:
        return None
    key = api_key_of(variable)
    if key is None:
        raise ConfigError(f"--api-key-env {variable}: this environment variable is not set")
    return key


def open_listener(host: str, port: int, key: str | None) -> socket.socket:
    """Return a listening socket for ``--host`` and ``--port``.

    Raises:
        ConfigError: the address cannot be bound, or other machines can reach it and there is no API key.
    """
    try:
        listener = listen(host, port)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: {error.strerror or error}. --port 0 chooses any free port"
        ) from None
    if key is None and not is_loopback(listener):
        listener.close()
        raise ConfigError(f"--host {host}: other machines can reach this address, so give --api-key-env NAME, too")
    return listener


def serve_until_signal(
    app: Any, listener: socket.socket, *, on_signal: Callable[[Callable[[], None]], None], grace_s: int
) -> None:
    """Serve an ASGI app until Ctrl-C or SIGTERM; see `_uvicorn_config` for ``grace_s``.

    The signal handler calls ``on_signal`` for each signal; repeated signals within a second count once. Its argument is
    a function that stops the server: until it is called, from any thread, the server accepts connections, so that the
    app can refuse requests with a reason. The third signal ends the process at once.
    """
    import uvicorn

    class StoppableServer(uvicorn.Server):
        signals = 0
        latest = 0.0

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if self.signals and now < self.latest + _SAME_S:
                return
            self.signals, self.latest = self.signals + 1, now
            if self.signals > 2:
                end_at_once()
            on_signal(self.stop)

        def stop(self) -> None:
            self.should_exit = True

    server = StoppableServer(_uvicorn_config(app, grace_s=grace_s, log_level="warning"))

    def handle(number: int, frame: FrameType | None) -> None:
        """Handle a signal while uvicorn does not: it starts and stops at once before, and is ignored after."""
        if not server.started:
            server.handle_exit(number, frame)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    server.run(sockets=[listener])


_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def stop_on_disconnect(receive: _Receive, work: Callable[[], Awaitable[None]]) -> bool:
    """Run ``work``, and cancel it if the client disconnects first; return whether it finished.

    ``receive`` is that of ASGI, for a request whose body has been read. Errors of ``work`` are raised.
    """
    done = False

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    try:
        async with anyio.create_task_group() as tasks:
            scope = tasks.cancel_scope
            tasks.start_soon(watch)
            await work()
            done = True
            scope.cancel()
    except BaseExceptionGroup as group:
        # The group contains only the exception of `work`: `watch` does not fail.
        raise group.exceptions[0] from None
    return done


# Protection of servers on this machine against web pages that a browser on this machine shows. A page may send requests
# to any address that its browser can reach, loopback included. Two checks recognise them:
#
# - The origin: a browser names the page's server in the `Origin` header of each request that can change something.
# - The host: a page whose name resolves to this machine (DNS rebinding) has this server's origin, but its own name
#   stands in the `Host` header. An IP address cannot be rebound.


def is_foreign_origin(origin: str | None, host: str) -> bool:
    """Return whether a request comes from a page of another server.

    Args:
        origin: the ``Origin`` header; ``None`` if the request has none, as those of programs.
        host: the ``Host`` header.
    """
    if origin is None:
        return False
    scheme, _, netloc = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme)
    return port is None or not netloc or netloc.removesuffix(port) != host.lower().removesuffix(port)


def is_known_host(host: str, names: Collection[str], any_address: bool) -> bool:
    """Return whether the ``Host`` header contains one of the names, which are lower case. The port is not checked.

    Args:
        host: the header.
        names: the accepted names and IP addresses.
        any_address: whether all IP addresses are accepted.
    """
    before, _, port = host.rpartition(":")
    name = (before if port.isdecimal() else host).strip("[]").lower()
    name = name.removesuffix(".")  # which ends a name that is complete, as "localhost."
    if name in names or not any_address:
        return name in names
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@functools.cache
def own_names() -> frozenset[str]:
    """Return the names of this machine, ``localhost`` included. The lookup is done once."""
    return frozenset(name.lower() for name in ("localhost", socket.gethostname(), socket.getfqdn()))
