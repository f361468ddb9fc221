"""Command-line options and HTTP serving that the library's own server processes share."""

from __future__ import annotations

import argparse
import socket
from typing import Any

from reward_loop._util.output import print_line
from reward_loop._util.parent_death_pipe import follow
from reward_loop._util.sockets import listen, url_of

__all__ = ["add_arguments", "follow_lifeline", "open_listener", "run", "serve"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options ``--fd``, ``--host``, ``--port`` and ``--lifeline-fd``."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--fd", type=int, metavar="N", help="an inherited listening socket, instead of host and port")
    parser.add_argument(
        "--lifeline-fd", type=int, metavar="N", help="an inherited pipe; its end of file ends the process"
    )


def follow_lifeline(args: argparse.Namespace) -> None:
    """Makes the process exit when the pipe ``--lifeline-fd``, if given, is closed. Call it before any slow work."""
    if args.lifeline_fd is not None:
        follow(args.lifeline_fd)


def run(app: Any, args: argparse.Namespace, name: str) -> None:
    """Serves an ASGI app until SIGTERM or SIGINT.

    Raises:
        SystemExit: the address cannot be bound; the message names it.
    """
    serve(app, open_listener(args), name)


def open_listener(args: argparse.Namespace) -> socket.socket:
    """Returns the listening socket that the options describe.

    Raises:
        SystemExit: the address cannot be bound; the message names it.
    """
    try:
        return listen(args.host, args.port) if args.fd is None else socket.socket(fileno=args.fd)
    except OSError as error:
        raise SystemExit(f"error: --host {args.host} --port {args.port}: {error.strerror or error}") from None


def serve(app: Any, listener: socket.socket, name: str) -> None:
    """Serves an ASGI app until SIGTERM or SIGINT, then finishes the requests in flight.

    Args:
        app: the app.
        listener: the listening socket.
        name: the name of the server in the line that announces its address.

    Raises:
        SystemExit: the app failed to start; the log shows the cause.
    """
    import uvicorn  # takes 0.2 s, and the router, which has its own server, must start fast

    print_line(f"{name} listens on {url_of(listener)}")
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        # By default, uvicorn would take an app whose start-up fails for an app without lifespan, and serve it.
        lifespan="on",
        ws="none",
        access_log=False,
        proxy_headers=False,
        # The router forwards these headers of the backends.
        server_header=False,
        date_header=False,
        backlog=4096,
        # Longer than clients keep idle connections, so that the client closes them, not the server.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    server.run(sockets=[listener])
    if not server.started:  # Newer versions of uvicorn raise SystemExit themselves.
        raise SystemExit(f"error: {name} failed to start")
