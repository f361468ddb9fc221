"""The embedded reward model server: a transformers model behind vLLM's HTTP interface."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
import transformers
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from reward_loop._util.disconnect import stop_on_disconnect
from reward_loop._util.output import print_line
from reward_loop.serving.checkpoint import ModelKind
from reward_loop.serving.embedded.batching import BatchingEngine, Generation, SamplingParams
from reward_loop.serving.embedded.dialect import (
    ApiError,
    ChatRequest,
    ClassifyRequest,
    PromptRequest,
    R,
    new_id,
    now,
    parse,
)
from reward_loop.serving.embedded.weights import read_model

__all__ = ["EmbeddedModel", "create_app", "load_model"]


class EmbeddedModel:
    """A model with its tokenizer and the engine that runs it.

    Args:
        model: a transformers model in eval mode.
        tokenizer: the model's tokenizer.
        name: the model's name in requests.
        kind: ``generative`` or ``discriminative``.
        load: loads the model again, for :meth:`wake_up`.
        engine_options: passed on to :class:`BatchingEngine`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        kind: ModelKind,
        load: Callable[[], Any],
        **engine_options: Any,
    ) -> None:
        self.name = name
        self.kind = kind
        self.tokenizer = tokenizer
        self.config = model.config
        self._template_options = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        self._model = model
        self._load = load
        self._answered = 0
        self._asleep: AsyncExitStack | None = None
        self._changing = asyncio.Lock()
        self.engine = BatchingEngine(
            model,
            pad_token_id=model.config.get_text_config().pad_token_id,
            eos_token_ids=_eos_token_ids(model, tokenizer),
            **engine_options,
        )

    async def chat(self, body: ChatRequest) -> dict[str, Any]:
        """Answers a chat completion request with ``n`` choices.

        Raises:
            ApiError: the model is not generative or has another name, or the request is not supported or not valid.
            ValueError: the engine rejects the prompt.
        """
        self._require("generative", "/v1/chat/completions", body.model)
        if body.stream:
            raise ApiError(400, "this server does not support streaming: omit `stream`", param="stream")
        if body.top_logprobs:
            raise ApiError(400, "this server returns logprobs of the chosen tokens only", param="top_logprobs")
        max_tokens = body.max_completion_tokens or body.max_tokens
        prompt = self._prompt(body, new_tokens=max_tokens or 1)
        if max_tokens is None:
            max_tokens = max(1, (self.engine.max_length or len(prompt) + 512) - len(prompt))
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            # vLLM clamps a bias to the same range.
            logit_bias=tuple((token, min(100.0, max(-100.0, bias))) for token, bias in sorted(body.logit_bias.items())),
            stop_token_ids=tuple(body.stop_token_ids or ()),
        )
        seeds = [None if body.seed is None else body.seed + index for index in range(body.n)]
        generations = await asyncio.gather(
            *(self.engine.generate(prompt, replace(params, seed=seed)) for seed in seeds)
        )
        self._answered += 1
        return {
            "id": new_id("chatcmpl"),
            "object": "chat.completion",
            "created": now(),
            "model": self.name,
            "choices": [self._choice(index, generation, body) for index, generation in enumerate(generations)],
            "usage": _usage(len(prompt), sum(len(generation.token_ids) for generation in generations)),
        }

    async def classify(self, body: ClassifyRequest) -> dict[str, Any]:
        """Answers a classification request, with one entry of ``data`` for each input.

        Raises:
            ApiError: the model is not discriminative or has another name, or the request is not valid.
            ValueError: the engine rejects an input.
        """
        self._require("discriminative", "/classify", body.model)
        inputs = self._inputs(body)
        data = []
        for index, logits in enumerate(await asyncio.gather(*map(self.engine.classify, inputs))):
            probs = logits if body.use_activation is False else self._activate(logits)
            label = self.config.id2label.get(max(range(len(probs)), key=probs.__getitem__))
            data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
        self._answered += 1
        return {
            "id": new_id("classify"),
            "object": "list",
            "created": now(),
            "model": self.name,
            "data": data,
            "usage": _usage(sum(map(len, inputs)), 0),
        }

    @property
    def asleep(self) -> bool:
        """Whether the weights are freed and requests wait."""
        return self._asleep is not None

    async def sleep(self) -> None:
        """Frees the memory of the weights after the running batch has ended. Requests wait until :meth:`wake_up`."""
        async with self._changing:
            if self._asleep is not None:
                return
            self._asleep = AsyncExitStack()
            await self._asleep.enter_async_context(self.engine.exclusive())
            for tensor in self._model.state_dict(keep_vars=True).values():
                tensor.data = tensor.data.new_empty(0)
            _note(f"asleep; answers so far: {self._answered}")

    async def wake_up(self) -> None:
        """Loads the weights again, and resumes the requests that wait."""
        async with self._changing:
            if self._asleep is None:
                return
            weights = (await asyncio.to_thread(self._load)).state_dict()
            for name, tensor in self._model.state_dict(keep_vars=True).items():
                tensor.data = weights[name]
            _note(f"awake; answers so far: {self._answered}")
            await self._asleep.aclose()
            self._asleep = None

    def _require(self, kind: ModelKind, path: str, model: str | None) -> None:
        if self.kind != kind:
            raise ApiError(404, f"the model `{self.name}` is {self.kind} and does not support {path}")
        if model is not None and model != self.name:
            raise ApiError(404, f"The model `{model}` does not exist; this server has `{self.name}`.", param="model")

    def _inputs(self, body: ClassifyRequest) -> list[list[int]]:
        if body.messages is not None:
            return [self._prompt(body, new_tokens=0)]
        given: Any = body.input
        items = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        special = body.add_special_tokens is not False
        return [self._token_ids(item, body, add_special_tokens=special, new_tokens=0) for item in items]

    def _prompt(self, body: ChatRequest | ClassifyRequest, *, new_tokens: int) -> list[int]:
        """Returns the token ids of the conversation, formatted with the model's chat template."""
        arguments = body.chat_template_kwargs
        if reserved := sorted(arguments.keys() & self._template_options):
            raise ApiError(
                400,
                f"chat_template_kwargs cannot set {', '.join(reserved)}: leave it out",
                param="chat_template_kwargs",
            )
        if isinstance(body, ChatRequest) and body.reasoning_effort is not None:
            arguments = {"reasoning_effort": body.reasoning_effort, **arguments}
        try:
            text = self.tokenizer.apply_chat_template(
                [message.as_dict() for message in body.messages or ()],
                add_generation_prompt=body.add_generation_prompt,
                tokenize=False,
                **arguments,
            )
        # A chat template may raise any exception for messages that it does not support.
        except Exception as error:
            raise ApiError(400, f"the chat template rejected the messages: {error}", param="messages") from error
        special = bool(body.add_special_tokens)
        return self._token_ids(text, body, add_special_tokens=special, new_tokens=new_tokens)

    def _token_ids(
        self, given: str | list[int], body: PromptRequest, *, add_special_tokens: bool, new_tokens: int
    ) -> list[int]:
        """Returns the token ids of a text or of a list of token ids, truncated if the request asks for it."""
        limit, side = body.truncate_prompt_tokens, body.truncation_side or self.tokenizer.truncation_side
        if limit == -1:
            limit = None if self.engine.max_length is None else max(0, self.engine.max_length - new_tokens)
        ids: Any = given
        if isinstance(given, str):
            options: dict[str, Any] = {"add_special_tokens": add_special_tokens}
            if limit and side == self.tokenizer.truncation_side:  # its own truncation keeps special tokens
                options |= {"truncation": True, "max_length": limit}
            try:
                ids = self.tokenizer(given, **options)["input_ids"]
            except Exception as error:  # caused by the text, or by a limit that is too small
                raise ApiError(400, f"the tokenizer rejected the text: {error}") from error
        if limit is None or len(ids) <= limit:
            return ids
        return ids[:limit] if side == "right" else ids[len(ids) - limit :]

    def _activate(self, logits: list[float]) -> list[float]:
        problem = getattr(self.config, "problem_type", None)
        if problem == "regression":
            return logits
        values = torch.tensor(logits)
        if problem == "multi_label_classification" or len(logits) == 1:
            return torch.sigmoid(values).tolist()
        return torch.softmax(values, dim=-1).tolist()

    def _choice(self, index: int, generation: Generation, body: ChatRequest) -> dict[str, Any]:
        text = self.tokenizer.decode(generation.token_ids, skip_special_tokens=body.skip_special_tokens)
        finish_reason, stop_reason = generation.finish_reason, None
        # Stop strings are searched in the complete text: the tokens after a stop string are generated and discarded.
        found = [(text.index(stop), stop) for stop in body.stop_strings if stop in text]
        if found:
            end, stop_reason = min(found)
            end += len(stop_reason) if body.include_stop_str_in_output else 0
            text, finish_reason = text[:end], "stop"
        return {
            "index": index,
            "message": {"role": "assistant", "content": text},
            "logprobs": {"content": self._logprobs(generation)} if body.logprobs else None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def _logprobs(self, generation: Generation) -> list[dict[str, Any]]:
        tokens = [self.tokenizer.decode([token]) for token in generation.token_ids]
        return [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(tokens, generation.logprobs, strict=True)
        ]


def load_model(path: str, *, name: str, kind: ModelKind, **engine_options: Any) -> EmbeddedModel:
    """Loads a model directory in float32; ``engine_options`` are passed to :class:`BatchingEngine`.

    Raises:
        ConfigError: the directory lacks weights of the model.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    load = partial(read_model, path, kind)
    model = load()
    text_config = model.config.get_text_config()
    if text_config.pad_token_id is None:
        text_config.pad_token_id = next(
            (token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0
        )
    return EmbeddedModel(model, tokenizer, name=name, kind=kind, load=load, **engine_options)


def create_app(model: EmbeddedModel, *, can_sleep: bool = False) -> FastAPI:
    """Returns the server's ASGI app. The engine runs during the app's lifespan.

    Args:
        model: the model to serve.
        can_sleep: whether the app has vLLM's ``/sleep``, ``/wake_up`` and ``/is_sleeping``.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with model.engine:
            yield

    app = FastAPI(title="reward_loop embedded server", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.code)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code in (404, 405):
            return await api_error(request, ApiError(404, f"there is no {request.method} {request.scope['path']}"))
        return await api_error(request, ApiError(error.status_code, str(error.detail)))

    @app.exception_handler(ClientDisconnect)
    async def disconnected(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> JSONResponse:
        # Starlette re-raises the exception after this response, and uvicorn then closes the connection.
        body = ApiError(500, f"{type(error).__name__}: {error}").body
        return JSONResponse(body, 500, headers={"Connection": "close"})

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

    if can_sleep:

        @app.post("/sleep")
        async def sleep() -> None:
            await model.sleep()

        @app.post("/wake_up")
        async def wake_up() -> None:
            await model.wake_up()

        @app.get("/is_sleeping")
        async def is_sleeping() -> dict[str, bool]:
            return {"is_sleeping": model.asleep}

    return app


async def _answer(request: Request, kind: type[R], work: Callable[[R], Awaitable[dict[str, Any]]]) -> Response:
    # Any web page can make a browser send other content types to any address, without a CORS preflight request.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(400, "Unsupported Media Type: only 'application/json' is allowed", param="content-type")
    body = parse(kind, await request.body())
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


def _note(what: str) -> None:
    """Prints a line with the time to the server's log."""
    print_line(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {what}")


def _eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        eos = getattr(source, "eos_token_id", None)
        ids.update([eos] if isinstance(eos, int) else eos or ())
    return sorted(ids)


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
