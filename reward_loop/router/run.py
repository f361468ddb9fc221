"""The router as a process."""

from __future__ import annotations

import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from reward_loop.errors import ConfigError
from reward_loop.router import serving
from reward_loop.router.app import create_app
from reward_loop.router.config import API_KEY_VARIABLE, RouterConfig, WorkerConfig
from reward_loop.router.protocol import protocol_for
from reward_loop.router.sockets import is_loopback, url_of

__all__ = ["run_router"]

logger = logging.getLogger(__name__)


def run_router(
    workers: Iterable[str | WorkerConfig], config: RouterConfig, listener: socket.socket, *, grace_s: int = 5
) -> None:
    """Runs the router until SIGTERM or SIGINT; then the requests in work are finished.

    Args:
        workers: the servers.
        config: options.
        listener: where it listens.
        grace_s: seconds for the requests in work.

    Raises:
        ConfigError: other machines could reach it, and there is no API key.
    """
    if not config.api_key and not is_loopback(listener):
        raise ConfigError(
            f"{url_of(listener)} can be reached from other machines: set an API key (the environment variable "
            f"{API_KEY_VARIABLE}), or listen on 127.0.0.1"
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _allow_many_connections(config.max_in_flight)
    app = create_app(workers, config)
    # What has been imported stays; the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    with _ending_well():
        serving.serve(app, listener, "router", http=protocol_for(config.max_header_bytes, app.begin), grace_s=grace_s)


def _allow_many_connections(requests: int) -> None:
    """Raises the limit on open files as far as this process may: each request takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * requests + 1024
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def _ending_well() -> Iterator[None]:
    """Lets SIGTERM and SIGINT end the process with status 0: uvicorn raises them once more after it has stopped."""
    before: dict[signal.Signals, Any] = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
