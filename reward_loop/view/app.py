"""The server of the viewer: the pages, and their data as JSON.

Routes are plain functions, so FastAPI runs them in threads: queries never block the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import socket
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reward_loop._util.api_keys import CHALLENGE, has_key
from reward_loop._util.json import encode
from reward_loop._util.web_server import is_known_host, own_names
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.index import questions
from reward_loop.index.filters import SampleFilter
from reward_loop.index.index import Index
from reward_loop.index.phases import StepTimes
from reward_loop.records import EVENTS, RecordsReader, live_numbers
from reward_loop.records import health as read_health
from reward_loop.view.samples import SampleQueries
from reward_loop.view.timeline import timeline

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"

HEARTBEAT_S = 15.0
"""Seconds after which an open stream of changes sends the state again, so that proxies keep it open."""

_NO_EVENTS = dict.fromkeys(("phases", "hidden_share", "waiting_s", "pending_s"))
"""The fields of a step for which the trainer has recorded no events."""


INTERVAL_S = 0.5
"""Seconds between two reads of the files. Polling is needed: shared file systems do not report changes."""


class Follower:
    """Reads new rows at intervals, and reports each change of the index.

    Args:
        index: the index.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._changed = asyncio.Condition()
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.problem: str | None = None
        """Why the last attempt to read new rows failed; ``None`` if it succeeded."""

    async def run(self) -> None:
        """Read new rows until `stop` is called."""
        self._loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            try:
                grown = await asyncio.to_thread(self._index.update)
            except (OSError, EOFError, RewardLoopError) as error:
                if self.problem is None:
                    logger.warning("cannot read new records: %s", error)
                self.problem, grown = str(error), False
            else:
                self.problem = None
            if grown:
                async with self._changed:
                    self._changed.notify_all()
            try:
                async with asyncio.timeout(INTERVAL_S):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    async def stop(self) -> None:
        """End `run` and all `revisions`."""
        self._stopping.set()
        async with self._changed:
            self._changed.notify_all()

    def stop_from_signal(self) -> None:
        """End all `revisions`, and `run`; may be called by a signal handler or by another thread."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self.stop(), self._loop)

    async def revisions(self, at_least_every_s: float) -> AsyncIterator[int]:
        """Yield the revision of the index now, after each change, and at least at an interval; ends with `stop`."""
        while not self._stopping.is_set():
            seen = self._index.revision
            yield seen
            try:
                async with asyncio.timeout(at_least_every_s), self._changed:
                    await self._changed.wait_for(lambda: self._stopping.is_set() or self._index.revision != seen)  # noqa: B023
            except TimeoutError:
                continue


def create_app(index: Index) -> FastAPI:
    """Return the ASGI app of the viewer, which follows the folder while it runs.

    Args:
        index: an open index, up to date.
    """
    follower, times = Follower(index), StepTimes(index.folder)
    reading = threading.Lock()
    samples = SampleQueries(index, RecordsReader(index.folder))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follower.run())
            try:
                yield
            finally:
                # Otherwise, the task group would wait for `run` indefinitely.
                await follower.stop()

    app = FastAPI(title="reward-loop view", lifespan=lifespan, openapi_url=None)
    app.state.follower = follower

    @app.exception_handler(HTTPException)
    def on_http_error(request: Request, error: HTTPException) -> Response:
        return _json({"error": str(error.detail)}, error.status_code)

    @app.exception_handler(RequestValidationError)
    def on_invalid(request: Request, error: RequestValidationError) -> Response:
        problems = (f"{found['loc'][-1]}: {found['msg']}" for found in error.errors())
        return _json({"error": "; ".join(problems)}, 400)

    @app.exception_handler(ConfigError)
    def on_config_error(request: Request, error: ConfigError) -> Response:
        return _json({"error": str(error)}, 400)

    @app.get("/api/run")
    def run() -> Response:
        notes = [] if follower.problem is None else [f"New records cannot be read: {follower.problem}"]
        return _json(
            {
                "folder": str(index.folder.absolute()),
                **questions.run(index),
                "following": index.is_following,
                "revision": index.revision,
                "events": any((index.folder / EVENTS).glob("*.jsonl")),
                "incomplete": index.incomplete,
                "notes": notes,
            }
        )

    @app.get("/api/steps")
    def steps(validate: bool = False) -> Response:
        # Routes run in threads, and the reader of phases keeps its place in the files.
        with reading:
            known = {} if validate else times.steps(questions.resumed(index))
        warnings: dict[Any, list[str]] = defaultdict(list)
        for warning in () if validate else read_health(index.folder):
            if warning["step"] is not None:
                warnings[warning["step"]].append(warning["message"])
        live = {} if validate else live_numbers(index.folder)
        rows = questions.steps(index, validate)
        if others := (known.keys() | warnings.keys()) - {row["step"] for row in rows}:
            # With generation ahead, the samples of a step have the number of an earlier one.
            rows += [{**questions.empty_summary(), "step": step, "validate": False} for step in others]
            rows.sort(key=lambda row: (row["step"] is None, row["step"]))
        return _json(
            {
                "rows": [
                    {
                        **row,
                        **known.get(row["step"], _NO_EVENTS),
                        "warnings": warnings.get(row["step"], []),
                        "live": live.get(row["step"], {}),
                    }
                    for row in rows
                ]
            }
        )

    @app.get("/api/overview")
    def overview(validate: bool = False) -> Response:
        return _json(questions.overview(index, validate))

    @app.get("/api/samples")
    def page(request: Request) -> Response:
        return _json(samples.page(request.query_params))

    @app.get("/api/groups")
    def groups(request: Request) -> Response:
        return _json(samples.groups(request.query_params))

    @app.get("/api/sample/{name:path}")
    def sample(name: str, request: Request) -> Response:
        found = samples.sample(name, request.query_params)
        if found is None:
            raise HTTPException(404, f"Sample {name} was not found.")
        return _json(found)

    @app.get("/api/judges")
    def all_judges(request: Request) -> Response:
        return _json({"rows": questions.judges(index, SampleFilter.parse(request.query_params), by_step=True)})

    @app.get("/api/timeline")
    def timeline_of(step: int) -> Response:
        try:
            return _json(timeline(index, step))
        except ConfigError as error:
            raise HTTPException(404, str(error)) from None

    @app.get("/api/health")
    def health() -> Response:
        return _json({"warnings": read_health(index.folder)})

    @app.get("/api/changes")
    async def changes() -> StreamingResponse:
        return StreamingResponse(_changes(index, follower), media_type="text/event-stream")

    # After all other routes: the first one that matches answers.
    @app.get("/api/{path:path}")
    def unknown(path: str) -> None:
        raise HTTPException(404, f"There is no /api/{path}.")

    app.mount("/", StaticFiles(directory=STATIC, html=True))
    return app


def _json(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


async def _changes(index: Index, follower: Follower) -> AsyncIterator[bytes]:
    """Yield server-sent events: the state of the index now, and after each change."""
    query = "SELECT count(*) AS samples, max(step) AS last_step FROM samples"
    async for revision in follower.revisions(HEARTBEAT_S):
        (found,) = await asyncio.to_thread(index.rows, query)
        yield b"data: %b\n\n" % encode({"revision": revision, **found})


COOKIE = "reward_loop_view_key"

# The pages show texts of models: a script in one must not run, even if a page failed to escape it.
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def host_names(listener: socket.socket, host: str) -> frozenset[str]:
    """Return the names that the Host header of a request may contain.

    Other names are rejected, which prevents DNS rebinding. The port is not checked: it differs behind a tunnel.

    Args:
        listener: the listening socket.
        host: the address that the user gave.
    """
    address = listener.getsockname()[0].partition("%")[0]
    names = {"localhost", "127.0.0.1", "::1", address, host.lower()}
    return frozenset(names if ipaddress.ip_address(address).is_loopback else names | own_names())


class Guard:
    """An ASGI middleware that rejects requests with an unknown Host name, or without the key.

    Requests that could write are rejected, too: the viewer only reads.

    A browser sends the key as a cookie, which the page ``/?key=KEY`` sets. Other clients send it as a bearer token.

    Args:
        app: the app.
        hosts: the accepted names in the Host header; IP addresses are always accepted with `any_address`.
        key: the key; ``None`` if none is needed.
        any_address: whether the server listens on all addresses of the machine.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], key: str | None, any_address: bool = False) -> None:
        self._app = app
        self._hosts = frozenset(hosts)
        self._key = key
        self._any_address = any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store" if scope["path"].startswith("/api/") else "no-cache")
            await send(message)

        answer = self._rejected(scope)
        await (self._app if answer is None else answer)(scope, receive, send_with_headers)

    def _rejected(self, scope: Scope) -> Response | None:
        """Return the error for a rejected request; ``None`` for an accepted one."""
        headers = Headers(scope=scope)
        host = ", ".join(headers.getlist("host"))
        if not is_known_host(host, self._hosts, self._any_address):
            return JSONResponse({"error": "Unknown host name: open the address that reward-loop view printed."}, 400)
        if scope["method"] not in ("GET", "HEAD"):
            return JSONResponse({"error": "The viewer only reads."}, 405)
        if self._key is None:
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("key")
        if scope["path"] == "/" and given and self._is_key(given[0]):
            # A redirection, so that the key does not stay in the address and the history of the browser.
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, self._key, httponly=True, samesite="strict")
            return answer
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        # Starlette decodes headers as Latin-1.
        if self._is_key(cookie) or has_key(headers.get("authorization", "").encode("latin-1"), self._key.encode()):
            return None
        message = "This server needs its key: open /?key=KEY, or send it as a bearer token."
        return JSONResponse({"error": message}, 401, CHALLENGE)

    def _is_key(self, given: str) -> bool:
        assert self._key is not None
        return hmac.compare_digest(given.encode(errors="replace"), self._key.encode())
