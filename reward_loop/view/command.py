"""The command ``reward-loop view``."""

from __future__ import annotations

import socket
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from reward_loop._util.standard_streams import console
from reward_loop._util.web_server import api_key, open_listener, serve_until_signal, url_of

if TYPE_CHECKING:
    from reward_loop.index.index import Index

PORT = 8765

_err = console(stderr=True)


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
    # Here: DuckDB takes a while to import, and other commands do not need it.
    from reward_loop.index.index import Index

    key = api_key(api_key_env)
    # The port first: a port in use is found before the index of a large folder is built.
    with open_listener(host, port, key) as listener, Index(folder) as index:
        _update(index)
        _serve(index, listener, host, key, open_browser)


def _update(index: Index) -> None:
    """Read all records."""
    from reward_loop.index.questions import keep_summaries

    with _err.status("indexing"):
        index.update()
        keep_summaries(index)


def _serve(index: Index, listener: socket.socket, host: str, key: str | None, open_browser: bool) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    from reward_loop.view.app import Guard, create_app, host_names

    app = create_app(index)
    any_address = listener.getsockname()[0] in ("0.0.0.0", "::")
    guarded = Guard(app, host_names(listener, host), key, any_address)
    url = url_of(listener) + "/"
    print(f"{index.folder} is shown at {url}" + ("" if key is None else "?key=KEY"), flush=True)
    if open_browser:
        webbrowser.open(url if key is None else f"{url}?key={quote(key)}")

    def end(stop: Callable[[], None]) -> None:
        app.state.follower.stop_from_signal()  # open streams of changes would delay the end
        stop()

    serve_until_signal(guarded, listener, on_signal=end, grace_s=2)
