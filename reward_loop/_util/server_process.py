"""Command-line options and HTTP serving that the library's own server processes share."""

from __future__ import annotations

import argparse
import socket
from typing import TYPE_CHECKING, Any

from reward_loop._util.sockets import listen, url_of
from reward_loop._util.standard_streams import print_line

__all__ = ["add_arguments", "open_listener", "run", "uvicorn_config"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options ``--fd``, ``--host``, ``--port`` and ``--parent-pipe``, see `parent_death_pipe`."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--fd", type=int, metavar="N", help="an inherited listening socket, instead of host and port")
    parser.add_argument(
        "--parent-pipe",
        type=int,
        metavar="N",
        help="file descriptor of an inherited pipe; this process exits when the parent closes it or dies",
    )


def open_listener(args: argparse.Namespace) -> socket.socket:
    """Returns the listening socket that the options describe.

    Raises:
        SystemExit: the address cannot be bound; the message names it.
    """
    try:
        return listen(args.host, args.port) if args.fd is None else socket.socket(fileno=args.fd)
    except OSError as error:
        raise SystemExit(f"error: --host {args.host} --port {args.port}: {error.strerror or error}") from None


def run(app: Any, args: argparse.Namespace, name: str) -> None:
    """Serves an ASGI app until SIGTERM or SIGINT, then finishes the requests in flight.

    Args:
        app: the app.
        args: the options.
        name: the name of the server in the line that announces its address.

    Raises:
        SystemExit: the address cannot be bound, or the app failed to start; the log shows the cause.
    """
    import uvicorn  # takes 0.2 s, and the router, which has its own server, must start fast

    listener = open_listener(args)
    print_line(f"{name} listens on {url_of(listener)}")
    # The router forwards the header `Date` of the backends.
    server = uvicorn.Server(uvicorn_config(app, grace_s=5, date_header=False, backlog=4096))
    server.run(sockets=[listener])
    if not server.started:  # Newer versions of uvicorn raise SystemExit themselves.
        raise SystemExit(f"error: {name} failed to start")


if TYPE_CHECKING:
    import uvicorn


def uvicorn_config(app: Any, *, grace_s: int, **options: Any) -> uvicorn.Config:
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
        # Longer than clients keep idle connections, so that the client closes them, not the server.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=grace_s,
        **options,
    )
