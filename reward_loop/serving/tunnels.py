"""Opens tunnels between nodes: a loopback server of one node becomes reachable at a loopback address of another.

Each end of a tunnel is a child process, which runs :mod:`reward_loop.serving.tunnels` and is restarted when it dies.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from urllib.parse import urlsplit

from reward_loop._util import web_server
from reward_loop._util.process import exit_with_parent, raise_descriptor_limit
from reward_loop._util.web_server import listen, url_of
from reward_loop.errors import ServerStartError
from reward_loop.serving.process import ServerProcess
from reward_loop.serving.supervisor import Supervisor

_LOOPBACK = "127.0.0.1"
_STARTS_WITHIN_S = 120.0
_KEY_VARIABLE = "REWARD_LOOP_TUNNEL_KEY"

_MAX_PREFACE = 1024
_HANDSHAKE_TIMEOUT_S = 10.0
_CHUNK = 65536

_ALIVE = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_REFUSED = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def new_key() -> str:
    """Return a new random key for the two ends of a tunnel."""
    return secrets.token_urlsafe(24)


def tunnel_exit(host: str, to: str, key: str) -> AbstractAsyncContextManager[str]:
    """Open the exit of a tunnel, through which other nodes reach a loopback server of this node.

    Args:
        host: the address of this node that other nodes can reach.
        to: ``host:port`` of the server.
        key: the shared key. Entries must have the same key.

    Yields:
        the exit's ``host:port``.

    Raises:
        ServerStartError: the process did not start, or the address cannot be used.
    """
    return _end("exit", host, to, key, "/live")


def tunnel_entry(to: str, key: str, *, health_path: str) -> AbstractAsyncContextManager[str]:
    """Open the entry of a tunnel: the server behind the exit becomes reachable at a loopback address of this node.

    Args:
        to: the exit's ``host:port``.
        key: the exit's key.
        health_path: the server answers a GET of this path with a status below 400.

    Yields:
        the entry's ``host:port``, once the server has answered through the tunnel.

    Raises:
        ServerStartError: the process did not start, or the server did not answer.
    """
    return _end("entry", _LOOPBACK, to, key, health_path)


@asynccontextmanager
async def _end(end: str, host: str, to: str, key: str, health_path: str) -> AsyncIterator[str]:
    name = f"tunnel {end} to {to}"
    try:
        listener = listen(host)
    except OSError as error:
        raise ServerStartError(f"{name}: cannot listen on {host}: {error.strerror or error}") from error

    def new_process() -> ServerProcess:
        return ServerProcess(
            name,
            [sys.executable, "-m", "reward_loop.serving.tunnels", end, "--to", to],
            bound=listener,
            log_path=None,
            # Not in the command line, which other users of the machine can read.
            env={_KEY_VARIABLE: key},
            health_path=health_path,
            start_timeout_s=_STARTS_WITHIN_S,
        )

    supervisor = Supervisor(new_process, max_restarts=10, window_s=600.0, bound=listener)
    supervisor.start()
    try:
        await supervisor.started
        yield urlsplit(url_of(listener)).netloc
    finally:
        await supervisor.stop()


async def _serve(
    to: tuple[str, int], preface: bytes, is_exit: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Handle one connection until both directions have ended.

    Args:
        to: host and port of the next hop.
        preface: the line with the key, which the entry sends and the exit checks.
        is_exit: whether this end is the exit.
        reader, writer: the connection.
    """
    onward: asyncio.StreamWriter | None = None
    try:
        # Of the handshake only: a judge may take minutes to answer.
        async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
            if is_exit and not await _admit(preface, reader, writer):
                return
            back, onward = await asyncio.open_connection(*to, limit=_CHUNK)
        if not is_exit:
            onward.write(preface)
        async with asyncio.TaskGroup() as both:
            both.create_task(_copy(reader, onward))
            both.create_task(_copy(back, writer))
    except* (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        # Abort both connections: after an orderly close, a truncated response would look complete.
        for end in filter(None, (writer, onward)):
            end.transport.abort()
    finally:
        for end in filter(None, (writer, onward)):
            end.close()


async def _admit(preface: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    line = await reader.readuntil(b"\r\n")
    if hmac.compare_digest(line, preface):
        return True
    # The health check of this end's own `ServerProcess` has no key.
    writer.write(_ALIVE if line.startswith(b"GET /live ") else _REFUSED)
    await writer.drain()
    return False


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):  # the connection may be closed already
        # Only this direction: the other end may still answer.
        writer.write_eof()


async def _run(to: tuple[str, int], key: str, is_exit: bool, listener: socket.socket) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    serve = partial(_serve, to, b"reward-loop-tunnel %b\r\n" % key.encode(), is_exit)
    # The limit bounds the line with the key: a client without the key could send a line that never ends.
    server = await asyncio.start_server(serve, sock=listener, limit=_MAX_PREFACE, backlog=4096)
    await stopped.wait()
    server.close()


def main() -> None:
    """Run one end until SIGTERM, or until the parent process dies."""
    parser = argparse.ArgumentParser(prog="python -m reward_loop.serving.tunnels", description=__doc__)
    parser.add_argument("end", choices=("entry", "exit"))
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="the address of the exit, or of the server")
    web_server.add_arguments(parser)
    args = parser.parse_args()
    if args.parent_pipe is not None:
        exit_with_parent(args.parent_pipe)
    raise_descriptor_limit()
    host, _, port = args.to.rpartition(":")
    to = (host.strip("[]"), int(port))
    asyncio.run(_run(to, os.environ[_KEY_VARIABLE], args.end == "exit", web_server.listener_of(args)))


if __name__ == "__main__":
    main()
