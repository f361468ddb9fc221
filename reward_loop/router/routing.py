"""Routing: which servers can answer a request, by its path and its ``model`` field."""

from __future__ import annotations

from typing import Any

import orjson

from reward_loop.router.backend import ANY, Route
from reward_loop.router.config import Kind
from reward_loop.router.error_answers import Refusal
from reward_loop.router.pool import BackendPool

_KIND_OF_PATH: dict[str, Kind] = {
    "/v1/chat/completions": "generative",
    "/v1/completions": "generative",
    "/v1/responses": "generative",
    "/v1/messages": "generative",
    "/generate": "generative",
    "/classify": "discriminative",
    "/v1/classify": "discriminative",
    "/pooling": "discriminative",
    "/v1/pooling": "discriminative",
    # Not /v1/score and /v1/rerank: generative SGLang servers answer them, too.
    "/score": "discriminative",
    "/rerank": "discriminative",
    "/v2/rerank": "discriminative",
    "/v1/embeddings": "discriminative",
}
"""The kind of request for each known path. Requests with other paths go to any server."""

_ROUTE_OF_PATH = {path: Route(kind=kind) for path, kind in _KIND_OF_PATH.items()}

_TEXT_FIELDS = ("text", "input", "input_ids")


class UnknownModelError(Refusal):
    """No server has the model of a request."""

    def __init__(self, model: str, available: str) -> None:
        super().__init__(404, f"the model {model!r} does not exist; available models: {available}", param="model")
        self.model = model


def model_of(body: bytes) -> str | None:
    """Return the model that a request names; ``None`` if it names none."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    model = fields.get("model") if isinstance(fields, dict) else None
    return model if isinstance(model, str) else None


def route(pool: BackendPool, path: str, body: bytes) -> Route:
    """Return the route of a request.

    The body is parsed only if servers have different models, or if the group contains a server that an empty text can
    crash.

    Raises:
        Refusal: no server can answer the request.
    """
    destination = _ROUTE_OF_PATH.get(path, ANY)
    kind = destination.kind
    group = pool.group(destination)
    if not group.members:
        if not pool.backends:
            raise Refusal(503, "the router has no reward model server")
        raise Refusal(400, f"{path} needs a {kind} server; available: {_served(pool)}")
    # A long prompt takes longer to parse than all else that the router does with a request.
    if body and (pool.several_models or (group.empty_text_can_crash and kind == "discriminative")):
        return _route_by_body(pool, path, kind, body)
    return destination


def _route_by_body(pool: BackendPool, path: str, kind: Kind | None, body: bytes) -> Route:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # A path that the router does not know may have any body; the server decides.
        if kind is None:
            return ANY
        # Refused here: the request could reach a server of another model, or crash one.
        raise Refusal(400, f"the body is not JSON: {error}") from None
    model = fields.get("model") if isinstance(fields, dict) else None
    if not isinstance(model, str):
        model = None
    if pool.several_models:
        if model is None and kind is not None:
            raise Refusal(400, f"the field 'model' is missing; available models: {_names(pool)}", param="model")
        if model is not None and not pool.group(Route(model)).members:
            raise UnknownModelError(model, _names(pool))
    else:
        # Servers that all have the same models answer for a wrong name themselves.
        model = None
    destination = Route(model, kind)
    group = pool.group(destination)
    if not group.members:
        raise Refusal(400, f"{path} needs a {kind} server, which {model!r} is not; available: {_served(pool)}")
    if group.empty_text_can_crash and kind == "discriminative" and _has_empty_text(fields):
        raise Refusal(400, "the text is empty, which can crash the SGLang server")
    return destination


def _has_empty_text(fields: Any) -> bool:
    if not isinstance(fields, dict):
        return False
    for name in _TEXT_FIELDS:
        text = fields.get(name)
        if text == "" or (isinstance(text, list) and (not text or "" in text or [] in text)):
            return True
    return False


def _names(pool: BackendPool) -> str:
    return ", ".join(sorted(pool.models))


def _served(pool: BackendPool) -> str:
    return "; ".join(
        f"{', '.join(backend.models) or backend.url} ({backend.config.kind or 'of unknown kind'})"
        for backend in pool.backends
    )
