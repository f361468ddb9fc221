"""The ASGI app of the service: its routes, health, metrics, and errors."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from reward_loop import __version__
from reward_loop._util.text import listing
from reward_loop.adapters.service import score_route
from reward_loop.adapters.service.dialects import DIALECTS, DialectOptions
from reward_loop.adapters.service.gate import Gate
from reward_loop.adapters.service.metrics import CONTENT_TYPE
from reward_loop.adapters.service.replies import error_reply, json_reply
from reward_loop.adapters.service.scored import ServiceError
from reward_loop.adapters.service.service import RETRY_AFTER_S, RewardService
from reward_loop.errors import ConfigError

__all__ = ["check_dialects", "create_app"]

MAX_PROBLEMS = 5
"""The number of problems that the answer to an invalid body lists."""


def check_dialects(service: RewardService, asked: Collection[str]) -> list[str]:
    """Return the dialects to serve: those that the user asks for, by default all that the function can serve.

    Raises:
        ConfigError: the user asks for a dialect that does not exist, or whose requests have single samples while the
            function needs whole groups.
    """
    for name in asked:
        if name not in DIALECTS:
            raise ConfigError(f"--dialect {name}: unknown; choose from {listing(DIALECTS)}")
    if not service.needs_groups:
        return list(asked or DIALECTS)
    if asked:
        raise ConfigError(
            f"--dialect {next(iter(asked))}: {service.name} compares the samples of a group, and this trainer sends "
            "single samples. Leave --dialect out: /score accepts whole groups"
        )
    return []


def create_app(
    service: RewardService,
    dialects: Collection[str],
    options: DialectOptions | None = None,
    *,
    key: str | None = None,
    max_body_bytes: int = 16 * 2**20,
) -> Gate:
    """Return the ASGI app. The service runs during the app's lifespan.

    Args:
        service: the service.
        dialects: names of the dialects to serve, see `check_dialects`.
        options: options of the dialects.
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
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(score_route.routes(service))
    for name in dialects:
        app.include_router(DIALECTS[name](service, options or DialectOptions()))
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
            raise ServiceError(503, "the service is stopping", retry_after_s=RETRY_AFTER_S)
        return json_reply({"status": "ok"})

    @app.get("/metrics", tags=["Operation"])
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    app.openapi_schema = None  # complete now
    return Gate(app, key=key, max_body_bytes=max_body_bytes, metrics=service.metrics, paths=paths)


def _place(location: Sequence[str | int]) -> str:
    """Return the place of a problem in a request, without the name of the kind of body that ``/score`` has."""
    return ".".join(str(part) for index, part in enumerate(location) if index != 1 or part not in score_route.KINDS)


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
