"""``python -m reward_loop.serving.embedded.app --options JSON``: serves a small model with vLLM's HTTP API.

The endpoints are ``/v1/chat/completions`` for a generative model, ``/classify`` for a discriminative one, and
``/v1/models`` and ``/health`` for both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from reward_loop._util import web_server
from reward_loop._util.api_keys import CHALLENGE, api_key_of, has_key
from reward_loop._util.process import exit_with_parent, raise_descriptor_limit
from reward_loop._util.web_server import stop_on_disconnect
from reward_loop.config import parse as parse_options
from reward_loop.errors import ConfigError
from reward_loop.serving.embedded.model import ApiError, ChatRequest, ClassifyRequest, EmbeddedModel, R, now, parse
from reward_loop.serving.engines import SERVER_KEY_VARIABLE
from reward_loop.serving.models import model_kind
from reward_loop.serving.options import ServedModelConfig


def create_app(model: EmbeddedModel, key: str | None = None) -> FastAPI:
    """Return the server's ASGI app for a model, whose engine runs during the app's lifespan.

    Args:
        model: the model.
        key: the API key that all requests need, except those for ``/health``.
    """

    def check_key(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if key is not None and request.url.path != "/health" and not has_key(given, key.encode()):
            raise ApiError(401, "the API key is missing or wrong: send it as a bearer token")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with model.engine:
            yield

    app = FastAPI(
        title="reward_loop embedded server",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(check_key)],
    )

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.code, CHALLENGE if error.code == 401 else None)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> JSONResponse:
        return await api_error(request, ApiError(404, f"unknown request: {request.method} {request.scope['path']}"))

    @app.exception_handler(ClientDisconnect)
    async def disconnected(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {
            "id": model.name,
            "object": "model",
            "created": now(),
            "owned_by": "reward_loop",
            "root": model.config.name_or_path,
            "max_model_len": model.engine.max_length,
        }
        return {"object": "list", "data": [card]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(request, ChatRequest, model.chat)

    @app.post("/classify")
    async def classify(request: Request) -> Response:
        return await _answer(request, ClassifyRequest, model.classify)

    return app


async def _answer(request: Request, kind: type[R], work: Callable[[R], Awaitable[dict[str, Any]]]) -> Response:
    # Any web page can make a browser send other content types to any address, without a CORS preflight request.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(400, "Unsupported Media Type: only 'application/json' is allowed", param="content-type")
    body = parse(kind, await request.body())
    # It stays if the client disconnects, which then does not read it.
    response: Response = Response(status_code=499)

    async def answer() -> None:
        nonlocal response
        try:
            response = JSONResponse(await work(body))
        # The engine rejects the request: it is too long or empty, or contains an unknown token.
        except ValueError as error:
            raise ApiError(400, str(error)) from error

    await stop_on_disconnect(request.receive, answer)
    return response


def main() -> int:
    """Run the server until SIGTERM; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m reward_loop.serving.embedded.app", description=__doc__)
    parser.add_argument("--options", required=True, metavar="JSON", help="the model, as a ServedModelConfig")
    web_server.add_arguments(parser)
    args = parser.parse_args()
    if args.parent_pipe is not None:
        exit_with_parent(args.parent_pipe)  # before any slow work
    try:
        config = parse_options(ServedModelConfig, orjson.loads(args.options), "--options")
        path, name = str(config.model_path), str(config.served_model_name or config.model_path)
        kind = model_kind(path, "model_path")
        raise_descriptor_limit()
        model = EmbeddedModel(path, name=name, kind=kind, max_batch_size=config.max_batch_size)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    web_server.serve(create_app(model, api_key_of(SERVER_KEY_VARIABLE)), args, f"{kind} model {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
