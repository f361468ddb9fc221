"""The command ``reward-loop view``."""

from __future__ import annotations

import os
import signal
import socket
import time
import webbrowser
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from reward_loop._util.output import print_line
from reward_loop._util.sockets import is_loopback, listen, url_of
from reward_loop.errors import ConfigError

if TYPE_CHECKING:
    from reward_loop.view.index import Index

__all__ = ["view"]

PORT = 8765

SAME_S = 1.0
"""After the first signal, further signals are ignored for this time in seconds: launchers may send several at once."""

_err = Console(stderr=True, soft_wrap=True, emoji=False)


def view(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A folder of records, such as checkpoints/.../rewards.", show_default=False),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = PORT,
    host: Annotated[str, typer.Option(help="Address to listen on. Without a key, only loopback.")] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Environment variable that contains the key for requests.", show_default=False
        ),
    ] = None,
) -> None:
    """Show the records of a run in the browser, also while it runs.

    The first start builds an index in the user's cache directory; later ones
    are fast. New records are shown as they are written. Stop with Ctrl-C.
    docs/viewer.md describes the pages.

    [bold]Examples[/]

      reward-loop view checkpoints/rewards --open

      ssh -L 8765:localhost:8765 NODE reward-loop view checkpoints/rewards
    """
    key = _key(api_key_env)
    try:
        from reward_loop.view.index import Index
    except ModuleNotFoundError as error:
        if error.name != "duckdb":
            raise
        raise ConfigError("reward-loop view needs DuckDB: pip install 'reward-loop[view]'") from error
    try:
        listener = listen(host, port)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: {error.strerror or error}. --port 0 chooses any free port"
        ) from None
    with listener:
        if key is None and not is_loopback(listener):
            raise ConfigError(f"--host {host}: other machines can reach this address, so give --api-key-env NAME, too")
        with Index(folder) as index:
            _update(index)
            _serve(index, listener, host, key, open_browser)


def _key(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise ConfigError(f"--api-key-env {name}: this environment variable is not set")
    return key


def _update(index: Index) -> None:
    """Read all records, with a progress bar in a terminal."""
    from reward_loop.view.summaries import Summaries

    progress = Progress(
        TextColumn("indexing"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=_err,
        disable=not _err.is_terminal,
        transient=True,
    )
    with progress:
        task = progress.add_task("indexing", total=index.pending_bytes())
        index.update(lambda done: progress.update(task, completed=done))
        Summaries(index).compute()


def _serve(index: Index, listener: socket.socket, host: str, key: str | None, open_browser: bool) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    import uvicorn

    from reward_loop.view.app import create_app
    from reward_loop.view.guard import Guard, host_names

    class Server(uvicorn.Server):
        stopped: float | None = None

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if self.stopped is not None and now < self.stopped + SAME_S:
                return
            self.stopped = self.stopped or now
            app.state.follower.stop_from_signal()  # otherwise open streams of changes would delay the end
            super().handle_exit(sig, frame)

    app = create_app(index)
    any_address = listener.getsockname()[0] in ("0.0.0.0", "::")
    config = uvicorn.Config(
        Guard(app, host_names(listener, host), key, any_address),
        loop="uvloop",
        http="httptools",
        lifespan="on",
        ws="none",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    url = url_of(listener) + "/"
    print_line(f"{index.folder} is shown at {url}" + ("" if key is None else "?key=KEY"))
    if open_browser:
        webbrowser.open(url if key is None else f"{url}?key={quote(key)}")
    # At its end, uvicorn raises the signals again that it received. The viewer has stopped as the user asked.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    Server(config).run(sockets=[listener])
