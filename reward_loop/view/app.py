"""The server of the viewer: the pages, and their data as JSON.

Routes are plain functions, so FastAPI runs them in threads: queries never block the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import socket
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import Body, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reward_loop._util.api_keys import has_key
from reward_loop._util.json import encode, look_up
from reward_loop._util.web_pages import is_foreign_origin, is_known_host, own_names
from reward_loop.errors import ConfigError
from reward_loop.offline.compare import compare_scorings, read_scoring
from reward_loop.offline.notes import Notes
from reward_loop.offline.report import Price
from reward_loop.records import EVENTS, RecordsReader
from reward_loop.records import health as read_health
from reward_loop.view.filters import GROUPS_PARAMETERS, SAMPLES_PARAMETERS, check_parameters
from reward_loop.view.index import Follower, Index
from reward_loop.view.phases import PhaseReader
from reward_loop.view.samples import SampleQueries
from reward_loop.view.summaries import Summaries, judges, without_samples
from reward_loop.view.timeline import timeline

STATIC = Path(__file__).parent / "static"

HEARTBEAT_S = 15.0
"""Seconds after which an open stream of changes sends the state again, so that proxies keep it open."""


KEY = "uid"
"""The field that names a sample in two scorings, if a request names no other one."""

MAX_NOTE = 10_000
"""The largest number of characters of a note."""

MAX_BODY = 64 * 1024
"""The largest size in bytes of the body of a request."""

LARGEST = 50
"""The number of samples with the largest differences in a comparison."""

_NO_EVENTS = dict.fromkeys(("phases", "hidden_share", "waiting_s"))
"""The fields of a step for which the trainer has recorded no events."""


def create_app(index: Index, price: Price | None = None) -> FastAPI:
    """Return the ASGI app of the viewer, which follows the folder while it runs.

    Args:
        index: an open index, up to date.
        price: the price of tokens, for the cost of judges.
    """
    follower, phases = Follower(index), PhaseReader(index.folder)
    reading, comparing = threading.Lock(), threading.Lock()
    reader, summaries = RecordsReader(index.folder), Summaries(index)
    samples = SampleQueries(index, reader, Notes(index.folder), price)

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

    @app.get("/api/run", dependencies=_only())
    def run() -> Response:
        notes = [] if follower.problem is None else [f"New records cannot be read: {follower.problem}"]
        return _json(
            {
                "folder": str(index.folder.absolute()),
                **summaries.run(),
                "following": index.is_following,
                "revision": index.revision,
                "events": any((index.folder / EVENTS).glob("*.jsonl")),
                "incomplete": index.incomplete,
                "notes": notes,
            }
        )

    @app.get("/api/steps", dependencies=_only("validate"))
    def steps(validate: bool = False) -> Response:
        # Routes run in threads, and the reader of phases keeps its place in the files.
        with reading:
            known = {} if validate else phases.steps()
        warnings: dict[Any, list[str]] = defaultdict(list)
        for warning in () if validate else read_health(index.folder):
            if warning["step"] is not None:
                warnings[warning["step"]].append(warning["message"])
        rows = summaries.steps(validate)
        if others := (known.keys() | warnings.keys()) - {row["step"] for row in rows}:
            # With generation ahead, the samples of a step have the number of an earlier one.
            rows += map(without_samples, others)
            rows.sort(key=lambda row: (row["step"] is None, row["step"]))
        return _json(
            {
                "rows": [
                    {**row, **known.get(row["step"], _NO_EVENTS), "warnings": warnings.get(row["step"], [])}
                    for row in rows
                ]
            }
        )

    @app.get("/api/overview", dependencies=_only("validate"))
    def overview(validate: bool = False) -> Response:
        return _json(summaries.overview(validate))

    @app.get("/api/samples", dependencies=_only(*SAMPLES_PARAMETERS))
    def page(request: Request) -> Response:
        return _json(samples.page(request.query_params))

    @app.get("/api/groups", dependencies=_only(*GROUPS_PARAMETERS))
    def groups(request: Request) -> Response:
        return _json(samples.groups(request.query_params))

    @app.get("/api/sample/{name:path}", dependencies=_only(*SAMPLES_PARAMETERS))
    def sample(name: str, request: Request) -> Response:
        found = samples.sample(name, request.query_params)
        if found is None:
            raise HTTPException(404, f"Sample {name} was not found.")
        return _json(found)

    @app.post("/api/note/{name:path}", dependencies=_only())
    def note(name: str, text: Annotated[str, Body(embed=True, max_length=MAX_NOTE)]) -> Response:
        try:
            if not samples.write_note(name, text.strip()):
                raise HTTPException(404, f"Sample {name} was not found.")
        except OSError as error:
            raise HTTPException(507, f"The note cannot be saved in {error.filename}: {error.strerror}") from None
        return _json({"note": text.strip() or None})

    @app.get("/api/judges", dependencies=_only("step", "validate"))
    def all_judges(request: Request) -> Response:
        return _json(judges(index, price, request.query_params))

    @app.get("/api/timeline", dependencies=_only("step"))
    def timeline_of(step: int) -> Response:
        try:
            return _json(timeline(index.folder, step))
        except ConfigError as error:
            raise HTTPException(404, str(error)) from None

    @app.get("/api/compare", dependencies=_only("other", "on", "label", "threshold"))
    def compared(other: str, on: str = KEY, label: str | None = None, threshold: float | None = None) -> Response:
        with comparing:  # each reads both folders into memory
            a, b = (read_scoring(path, on=on, label=label) for path in (index.folder, Path(other)))
            return _json(compare_scorings(a, b, label=label, threshold=threshold, largest=LARGEST))

    @app.get("/api/compare/sample", dependencies=_only("other", "sample", "on"))
    def compared_sample(other: str, sample: str, on: str = KEY) -> Response:
        with comparing:
            a, b = (_sample_of(path, sample, on) for path in (index.folder, Path(other)))
        if a is None or b is None:
            raise HTTPException(
                404, f"No sample with {on} {sample} was found in {index.folder if a is None else other}."
            )
        return _json({"a": a, "b": b})

    @app.get("/api/health", dependencies=_only())
    def health() -> Response:
        return _json({"warnings": read_health(index.folder)})

    @app.get("/api/changes", dependencies=_only())
    async def changes() -> StreamingResponse:
        return StreamingResponse(_changes(index, follower), media_type="text/event-stream")

    # After all other routes: the first one that matches answers.
    @app.get("/api/{path:path}")
    def unknown(path: str) -> None:
        raise HTTPException(404, f"There is no /api/{path}.")

    app.mount("/", StaticFiles(directory=STATIC, html=True))
    return app


def _only(*names: str) -> list[Any]:
    """Return the dependencies of a route that refuses all other parameters."""

    def check(request: Request) -> None:
        check_parameters(request.query_params, names)

    return [Depends(check)]


def _json(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


async def _changes(index: Index, follower: Follower) -> AsyncIterator[bytes]:
    """Yield server-sent events: the state of the index now, and after each change."""
    query = "SELECT count(*) AS samples, max(step) AS last_step FROM samples"
    async for revision in follower.revisions(HEARTBEAT_S):
        (found,) = await asyncio.to_thread(index.rows, query)
        yield b"data: %b\n\n" % encode({"revision": revision, **found})


def _sample_of(path: Path, key: str, on: str) -> dict[str, Any] | None:
    """Return the row, the texts and the exchanges of a sample; ``None`` if the scoring does not contain it.

    Args:
        path: a folder of records.
        key: the value that names the sample, as text. Of several records, the latest counts.
        on: the field with this value.
    """
    reader = RecordsReader(path)
    found = [row for row in reader.rows(uid=key if on == "uid" else None) if str(look_up(row, on)) == key]
    if not found:
        return None
    # Of equal times, the last row counts, as in the comparison.
    row = max(reversed(found), key=lambda row: row.get("time") or 0.0)
    return {"row": row, "texts": reader.text(row), "exchanges": reader.exchanges(row)}


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

    A request that writes must come from a page of this server, or from a program: pages of other servers cannot send
    JSON without a permission (CORS) that this server never gives, and browsers name their origin.

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
        host, origin = (", ".join(headers.getlist(name)) for name in ("host", "origin"))
        if not is_known_host(host, self._hosts, self._any_address):
            return JSONResponse({"error": "Unknown host name: open the address that reward-loop view printed."}, 400)
        if scope["method"] not in ("GET", "HEAD"):
            # Required: without it, the size of a body is known only when it has been read.
            size = headers.get("content-length", "")
            if is_foreign_origin(origin or None, host):
                return JSONResponse({"error": "Pages of other servers cannot change anything here."}, 403)
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                return JSONResponse({"error": "The body must be JSON: set Content-Type: application/json."}, 415)
            if not size.isdecimal() or int(size) > MAX_BODY:
                return JSONResponse({"error": f"The body must have at most {MAX_BODY} bytes, and Content-Length."}, 413)
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
        return JSONResponse({"error": "This server needs its key: open /?key=KEY, or send it as a bearer token."}, 401)

    def _is_key(self, given: str) -> bool:
        assert self._key is not None
        return hmac.compare_digest(given.encode(errors="replace"), self._key.encode())
