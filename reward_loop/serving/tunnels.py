"""Opens tunnels between nodes: a loopback server of one node becomes reachable at a loopback address of another.

Each end of a tunnel is a child process, which runs :mod:`reward_loop.serving.tunnel` and is restarted when it dies.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from reward_loop._util.sockets import listen, url_of
from reward_loop.errors import ServerStartError
from reward_loop.serving.process import ServerProcess
from reward_loop.serving.supervisor import RestartPolicy, Supervisor
from reward_loop.serving.tunnel import KEY_VARIABLE

__all__ = ["new_key", "tunnel_entry", "tunnel_exit"]

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
            [sys.executable, "-m", "reward_loop.serving.tunnel", end, "--to", to],
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
