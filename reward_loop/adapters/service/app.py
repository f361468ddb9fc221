"""The ASGI app of the service: its routes, health, metrics, errors and API page, behind a gate that checks requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from html import escape
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reward_loop import __version__
from reward_loop._util.api_keys import has_key
from reward_loop._util.web_pages import is_foreign_origin, is_known_host, own_names
from reward_loop.adapters.service.dialects import KINDS, DialectOptions, llamafactory, openrlhf, score_route, slime
from reward_loop.adapters.service.nemo_gym import nemo_gym
from reward_loop.adapters.service.replies import ServiceError, error_reply, json_reply
from reward_loop.adapters.service.service import Metrics, RewardService

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths for health checks, which need no key."""

BODY_S = 60.0
"""Seconds within which a client must send the body."""

MAX_PROBLEMS = 5
"""The number of problems that the answer to an invalid body lists."""


def create_app(
    service: RewardService,
    *,
    options: DialectOptions | None = None,
    key: str | None = None,
    max_body_bytes: int = 16 * 2**20,
) -> ServiceGate:
    """Return the ASGI app. The service runs during the app's lifespan.

    Args:
        service: the service.
        options: options of the dialects. A function that needs whole groups is served at ``/score`` only: the requests
            of the trainers have single samples.
        key: the API key; ``None`` if none is needed.
        max_body_bytes: the longest body of a request.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service:
            yield

    app = FastAPI(
        title="reward-loop serve",
        version=__version__,
        description=f"Scores responses with `{service.name}`.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads its scripts from another server
        redoc_url=None,
        redirect_slashes=False,
    )
    score_route(app, service)
    if not service.needs_groups:
        for add_routes in (openrlhf, slime, llamafactory, nemo_gym):
            add_routes(app, service, options or DialectOptions())
    # Before the routes of operation: a wrong path is answered with the paths that score.
    paths = sorted(app.openapi()["paths"])
    _add_errors(app, paths)

    @app.get("/health", tags=["Operation"])
    async def health() -> Response:
        """Return 200 while the process runs."""
        return json_reply({"status": "ok"})

    @app.get("/ready", tags=["Operation"])
    async def ready() -> Response:
        """Return 200 while samples are accepted, otherwise 503."""
        if service.stopping:
            raise ServiceError(503, "the service is stopping")
        return json_reply({"status": "ok"})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(api_page(app.openapi()))

    @app.get("/metrics", tags=["Operation"])
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    app.openapi_schema = None  # complete now
    return ServiceGate(app, key=key, max_body_bytes=max_body_bytes, metrics=service.metrics, paths=paths)


def _place(location: Sequence[str | int]) -> str:
    """Return the place of a problem in a request, without the name of the kind of body that ``/score`` has."""
    return ".".join(str(part) for index, part in enumerate(location) if index != 1 or part not in KINDS)


def _add_errors(app: FastAPI, paths: Collection[str]) -> None:
    @app.exception_handler(ServiceError)
    async def on_error(_: Request, error: ServiceError) -> Response:
        return error_reply(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        problems = error.errors()
        if problems[0]["type"] == "json_invalid":
            where = f"{problems[0]['ctx']['error']} at character {problems[0]['loc'][-1]}"
            return error_reply(ServiceError(400, f"the body is not JSON: {where}"))
        # The request's values are left out: they may be long.
        shown = [f"{_place(problem['loc'])}: {problem['msg']}" for problem in problems[:MAX_PROBLEMS]]
        more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        return error_reply(ServiceError(422, "; ".join(shown) + more))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code in (404, 405):
            text = f"no {request.method} {request.url.path}; POST to one of {', '.join(paths)}"
            return error_reply(ServiceError(error.status_code, text))
        return error_reply(ServiceError(error.status_code, str(error.detail)))

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)


class ServiceGate:
    """An ASGI middleware: it answers requests without the key with 401, and those with too long a body with 413.

    Without a key, requests of web pages get 403: they could spend the budget of a judge.

    The key is a bearer token, or the password in the URL (HTTP Basic, with any user name): many trainers send requests
    to a URL without headers of their own.

    Args:
        app: the app.
        key: the key; ``None`` if none is needed.
        max_body_bytes: the longest body.
        metrics: counts the answers.
        paths: the paths of the app, for the metrics.
    """

    def __init__(
        self, app: ASGIApp, *, key: str | None, max_body_bytes: int, metrics: Metrics, paths: Collection[str]
    ) -> None:
        self._app = app
        self._key = None if key is None else key.encode()
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        # A client may ask for any path, and each label would be one more time series.
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(path, message["status"]).inc()
                self._metrics.seconds.labels(path).observe(time.perf_counter() - started)
            await send(message)

        headers = Headers(scope=scope)
        try:
            if scope["path"] not in OPEN_PATHS:
                self._check_sender(headers)
            body = await self._body(headers, receive)
        except ServiceError as error:
            await error_reply(error)(scope, receive, counted)
            return
        if body is None:
            return
        unread = [body]

        # After the body, the app must still be able to see that the client disconnects.
        async def replay() -> Message:
            return {"type": "http.request", "body": unread.pop(), "more_body": False} if unread else await receive()

        await self._app(scope, replay, counted)

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """Return the body; ``None`` if the client disconnected before its end.

        Raises:
            ServiceError: the body is too long (413), or it does not arrive in time (408).
        """
        length = headers.get("content-length", "0")
        # Before a byte is read. A body in chunks has no length, so what arrives is counted, too.
        self._check_length(int(length) if length.isdecimal() else 0)
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(BODY_S):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._check_length(size)
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ServiceError(408, f"the body did not arrive within {BODY_S:g} s") from None
        return b"".join(parts)

    def _check_length(self, length: int) -> None:
        if length > self._max_body_bytes:
            raise ServiceError(
                413,
                f"the body is longer than {self._max_body_bytes} bytes: send fewer samples, or raise --max-body-mb",
            )

    def _check_sender(self, headers: Headers) -> None:
        if self._key is None:
            self._refuse_web_pages(headers)
            return
        # Starlette decodes headers as Latin-1.
        if not has_key(headers.get("authorization", "").encode("latin-1"), self._key, basic=True):
            raise ServiceError(
                401,
                "the API key is missing or wrong: send it as a bearer token, or in the URL as "
                "http://key:KEY@host:port/path",
            )

    def _refuse_web_pages(self, headers: Headers) -> None:
        host, origin = (", ".join(headers.getlist(name)) for name in ("host", "origin"))
        known = is_known_host(host or "localhost", own_names(), any_address=True)
        if not known or is_foreign_origin(origin or None, host):
            raise ServiceError(
                403, "requests of web pages are refused: use the IP address of the service, or set --api-key-env"
            )


_STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; vertical-align: top; padding: .3rem .6rem;
border-bottom: 1px solid #ccc } code { font-size: 90% }"""


def api_page(schema: Mapping[str, Any]) -> str:
    """Return the page for an OpenAPI schema."""
    parts = [f"<h1>{escape(schema['info']['title'])}</h1>", _text(schema["info"].get("description", ""))]
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(_text(operation.get("description") or operation.get("summary", "")))
            if body := operation.get("requestBody"):
                parts.append(f"<p>Body: {_content(body)}</p>")
            replies = operation.get("responses", {}).items()
            rows = [(f"{status}: {escape(reply.get('description', ''))}", _content(reply)) for status, reply in replies]
            parts.append("<p>Replies:</p>" + _table(("Status", "Body"), rows))
    for name, model in schema.get("components", {}).get("schemas", {}).items():
        parts.append(f'<h2 id="{escape(name)}">{escape(name)}</h2>{_text(model.get("description", ""))}')
        required = model.get("required", ())
        fields = [
            (f"<code>{escape(field)}</code>{'' if field in required else ' (optional)'}", _type(of), _text(_about(of)))
            for field, of in model.get("properties", {}).items()
        ]
        parts.append(_table(("Field", "Type", "Meaning"), fields) if fields else f"<p>{_type(model)}</p>")
    return (
        f"<!DOCTYPE html><html lang=en><meta charset=utf-8><title>{escape(schema['info']['title'])}</title>"
        f"<style>{_STYLE}</style>{''.join(parts)}<p>For programs: <a href=openapi.json>openapi.json</a></p></html>"
    )


def _text(text: str) -> str:
    return "".join(f"<p>{escape(paragraph)}</p>" for paragraph in text.split("\n\n") if paragraph)


def _about(field: Mapping[str, Any]) -> str:
    default = f"Default: {field['default']!r}." if field.get("default") is not None else ""
    return f"{field.get('description', '')} {default}".strip()


def _content(part: Mapping[str, Any]) -> str:
    types = [_type(content["schema"]) for content in part.get("content", {}).values() if content.get("schema")]
    return " or ".join(types) or "-"


def _type(schema: Mapping[str, Any]) -> str:
    if reference := schema.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(map(_type, alternatives))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if "const" in schema or "enum" in schema:
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in schema.get("enum", [schema.get("const")]))
    return escape(schema.get("type", "anything"))


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = ["".join(f"<th>{head}</th>" for head in heads)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
