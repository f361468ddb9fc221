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
from pathlib import Path
from urllib.parse import urlsplit

from reward_loop._util.process import exit_with_parent, raise_descriptor_limit
from reward_loop._util.sockets import listen, url_of
from reward_loop.errors import ServerStartError
from reward_loop.serving.process import ServerProcess
from reward_loop.serving.supervisor import RestartPolicy, Supervisor

__all__ = ["KEY_VARIABLE", "main", "new_key", "tunnel_entry", "tunnel_exit"]

_LOOPBACK = "127.0.0.1"
_RESTARTS = RestartPolicy(max_restarts=10, window_s=600.0)
_STARTS_WITHIN_S = 120.0


def new_key() -> str:
    """Returns a new random key for the two ends of a tunnel."""
    return secrets.token_urlsafe(24)


def tunnel_exit(host: str, to: str, key: str, *, log_path: Path | None = None) -> AbstractAsyncContextManager[str]:
    """Opens the exit of a tunnel, through which other nodes reach a loopback server of this node.

    Args:
        host: the address of this node that other nodes can reach.
        to: ``host:port`` of the server.
        key: the shared key. Entries must have the same key.
        log_path: the log; by default a file in a new temporary directory.

    Yields:
        the exit's ``host:port``.

    Raises:
        ServerStartError: the process did not start, or the address cannot be used.
    """
    return _end("exit", host, to, key, "/live", log_path)


def tunnel_entry(
    to: str, key: str, *, health_path: str, log_path: Path | None = None
) -> AbstractAsyncContextManager[str]:
    """Opens the entry of a tunnel: the server behind the exit becomes reachable at a loopback address of this node.

    Args:
        to: the exit's ``host:port``.
        key: the exit's key.
        health_path: the server answers a GET of this path with a status below 400.
        log_path: as for :func:`tunnel_exit`.

    Yields:
        the entry's ``host:port``, once the server has answered through the tunnel.

    Raises:
        ServerStartError: the process did not start, or the server did not answer.
    """
    return _end("entry", _LOOPBACK, to, key, health_path, log_path)


@asynccontextmanager
async def _end(end: str, host: str, to: str, key: str, health_path: str, log_path: Path | None) -> AsyncIterator[str]:
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
            log_path=log_path,
            env={KEY_VARIABLE: key},
            health_path=health_path,
            start_timeout_s=_STARTS_WITHIN_S,
        )

    supervisor = Supervisor(new_process, _RESTARTS, bound=listener)
    supervisor.start()
    try:
        await supervisor.started
        yield urlsplit(url_of(listener)).netloc
    finally:
        await supervisor.stop()


KEY_VARIABLE = "REWARD_LOOP_TUNNEL_KEY"

_PREFACE = b"reward-loop-tunnel "
_MAX_PREFACE = 1024
_HANDSHAKE_TIMEOUT_S = 10.0
_CHUNK = 65536

_ALIVE = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_REFUSED = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class _End:
    """One end of a tunnel.

    Args:
        to: host and port of the next hop.
        key: the shared key, which the entry sends and the exit checks.
        checks: whether this end is the exit.
    """

    def __init__(self, to: tuple[str, int], key: bytes, *, checks: bool) -> None:
        self._to = to
        self._preface = _PREFACE + key + b"\r\n"
        self._checks = checks

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles one connection until both directions have ended."""
        onward: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                if self._checks and not await self._admit(reader, writer):
                    return
                back, onward = await asyncio.open_connection(*self._to, limit=_CHUNK)
            if not self._checks:
                onward.write(self._preface)
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

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        line = await reader.readuntil(b"\r\n")
        if hmac.compare_digest(line, self._preface):
            return True
        writer.write(_ALIVE if line.startswith(b"GET /live ") else _REFUSED)
        await writer.drain()
        return False


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):  # the connection may be closed already
        writer.write_eof()


async def _run(end: _End, listener: socket.socket) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    server = await asyncio.start_server(end.serve, sock=listener, limit=_MAX_PREFACE, backlog=4096)
    await stopped.wait()
    server.close()


def main() -> None:
    """Runs one end until SIGTERM, or until the parent process dies."""
    parser = argparse.ArgumentParser(prog="python -m reward_loop.serving.tunnels", description=__doc__)
    parser.add_argument("end", choices=("entry", "exit"))
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="the address of the exit, or of the server")
    parser.add_argument("--fd", type=int, required=True, metavar="N", help="an inherited listening socket")
    parser.add_argument(
        "--parent-pipe",
        type=int,
        required=True,
        metavar="N",
        help="file descriptor of an inherited pipe; this process exits when the parent closes it or dies",
    )
    args = parser.parse_args()
    exit_with_parent(args.parent_pipe)
    raise_descriptor_limit()
    host, _, port = args.to.rpartition(":")
    end = _End((host.strip("[]"), int(port)), os.environ[KEY_VARIABLE].encode(), checks=args.end == "exit")
    asyncio.run(_run(end, socket.socket(fileno=args.fd)))


if __name__ == "__main__":
    main()
