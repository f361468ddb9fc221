"""Listens and serves until Ctrl-C, for the commands that are servers."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from reward_loop._util.server_process import uvicorn_config
from reward_loop._util.sockets import is_loopback, listen
from reward_loop.errors import ConfigError

__all__ = ["api_key", "open_listener", "serve_until_signal"]

SAME_S = 1.0
"""After a signal, further signals are ignored for this time in seconds: launchers may send several at once."""


def api_key(variable: str | None) -> str | None:
    """Return the API key in an environment variable, the value of ``--api-key-env``; ``None`` without the option.

    Raises:
        ConfigError: the variable is not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
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
    """Serve an ASGI app until Ctrl-C or SIGTERM; see `uvicorn_config` for ``grace_s``.

    The signal handler calls ``on_signal`` for each signal; repeated signals within a second count once. Its argument is
    a function that stops the server: until it is called, from any thread, the server accepts connections, so that the
    app can refuse requests with a reason. The third signal ends the server without waiting for the app.
    """
    import uvicorn

    class Server(uvicorn.Server):
        signals = 0
        latest = 0.0

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if self.signals and now < self.latest + SAME_S:
                return
            self.signals, self.latest = self.signals + 1, now
            on_signal(self.stop)
            if self.signals > 2:
                self.stop()
                self.force_exit = True

        def stop(self) -> None:
            self.should_exit = True

    # At its end, uvicorn raises the signals again that it received. The server has stopped as the user asked.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    Server(uvicorn_config(app, grace_s=grace_s, log_level="warning")).run(sockets=[listener])
