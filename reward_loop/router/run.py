"""The router as a process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from reward_loop.errors import ConfigError
from reward_loop.router import serving
from reward_loop.router.app import create_app
from reward_loop.router.config import RouterConfig, WorkerConfig
from reward_loop.router.refusal import Refusal
from reward_loop.router.sockets import is_loopback, url_of

__all__ = ["API_KEY_VARIABLE", "LimitedHead", "WORKER_API_KEY_VARIABLE", "run_router"]

API_KEY_VARIABLE = "REWARD_LOOP_API_KEY"
WORKER_API_KEY_VARIABLE = "REWARD_LOOP_WORKER_API_KEY"

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
        serving.serve(app, listener, "router", http=_limited_head(config.max_header_bytes), grace_s=grace_s)


class _HeadWithBody:
    """A transport that writes the head of an answer together with what follows at once: one system call, not two."""

    __slots__ = ("_head", "_loop", "_transport")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        head = self._head
        if head is not None:
            self._head = None
            self._transport.write(head + data)
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            self._transport.write(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class LimitedHead(HttpToolsProtocol):
    """uvicorn's protocol with a bound on the length of a request's head, which it would otherwise collect for ever."""

    max_bytes = 64 * 1024
    _in_head = True
    _length = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(_HeadWithBody(transport))  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._length += len(data)
        super().data_received(data)
        # What has come may have ended the head; then the rest is the body's.
        if self._in_head and self._length > self.max_bytes and not self.transport.is_closing():
            self._refuse_head()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._length = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        # The first bytes of the next head come before its beginning is parsed.
        self._in_head = True
        super().on_message_complete()

    def _refuse_head(self) -> None:
        refusal = Refusal(431, f"the head of the request is longer than {self.max_bytes} bytes", close=True)
        headers, body = refusal.render()
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\n%b\r\n%b" % (lines, body))
        self.transport.close()


def _limited_head(max_bytes: int) -> type[asyncio.Protocol]:
    return type("LimitedHead", (LimitedHead,), {"max_bytes": max_bytes})


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
    before: dict[int, Any] = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
