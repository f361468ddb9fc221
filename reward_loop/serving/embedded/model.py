"""The model of the embedded server, and the part of vLLM's HTTP API that it answers."""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal, TypeVar

import torch
import transformers
from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError, model_validator

from reward_loop._util.text import listing
from reward_loop.errors import ConfigError
from reward_loop.serving.embedded.batching import BatchingEngine, SamplingOptions, SamplingParams
from reward_loop.serving.models import ModelKind


class ApiError(Exception):
    """An error that the client receives in vLLM's format: ``{"error": {"message", "type", "param", "code"}}``."""

    def __init__(self, code: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        kind = {404: "NotFoundError", 500: "InternalServerError"}.get(code, "BadRequestError")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class RequestBody(BaseModel):
    """Base of all bodies. A field that this server does not know is an error, unless it is ``null``, as in vLLM."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class TextPart(RequestBody):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class Message(RequestBody):
    """One turn of a conversation."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the message as chat templates expect it, with the content joined to one string."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return {"role": self.role, "content": content}


class PromptRequest(RequestBody):
    """A request with a prompt that this server tokenizes."""

    model: str | None = None
    chat_template_kwargs: dict[str, Any] = {}


class ChatRequest(PromptRequest, SamplingOptions):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    n: Literal[1] = 1
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stream: Literal[False] = False


class ClassifyRequest(PromptRequest):
    """``POST /classify``: either ``input`` or ``messages``."""

    input: StrictStr | None = None
    text: Any = None
    """SGLang's name of `input`, which the library's client sends, too; ignored."""
    messages: list[Message] | None = Field(default=None, min_length=1)
    use_activation: Literal[False]
    """Required: the answer has logits, and servers that get no `use_activation` send probabilities."""

    @model_validator(mode="after")
    def _one_of(self) -> ClassifyRequest:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give either `input` or `messages`")
        return self


R = TypeVar("R", bound=PromptRequest)


def parse(kind: type[R], body: bytes) -> R:
    """Parse a request from JSON.

    Raises:
        ApiError: status 400: the body is not valid JSON (lone surrogates in strings are not valid), or a field has an
            invalid or unsupported value.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        paths = [".".join(map(str, problem["loc"])) for problem in problems]
        message = "; ".join(f"{path or 'body'}: {one['msg']}" for path, one in zip(paths, problems, strict=True))
        raise ApiError(400, message, param=paths[0].partition(".")[0] or None) from None


def envelope(prefix: str, kind: str, model: str, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
    """Return the fields that all responses have: a new id with this prefix, the time, the model and the usage."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": now(),
        "model": model,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
        },
    }


def now() -> int:
    """Return the Unix time in whole seconds."""
    return int(time.time())


class EmbeddedModel:
    """A model in float32 with its tokenizer, and the engine that runs it.

    Args:
        path: a model directory, or the name of a model of the Hugging Face hub.
        name: the model's name in requests.
        kind: ``generative`` or ``discriminative``.
        engine_options: passed on to :class:`BatchingEngine`.

    Raises:
        ConfigError: the directory lacks weights of the model.
    """

    def __init__(self, path: str, *, name: str, kind: ModelKind, **engine_options: Any) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.name = name
        self.kind = kind
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self._path = path
        self._model = self._read()
        self.config = self._model.config
        text_config = self.config.get_text_config()
        if text_config.pad_token_id is None:
            candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
            text_config.pad_token_id = next((token for token in candidates if token is not None), 0)
        self.engine = BatchingEngine(
            self._model,
            pad_token_id=text_config.pad_token_id,
            eos_token_ids=_eos_token_ids(self._model, self.tokenizer),
            **engine_options,
        )

    async def chat(self, body: ChatRequest) -> dict[str, Any]:
        """Answer a chat completion request.

        Raises:
            ApiError: the model is not generative or has another name, or the request is not supported or not valid.
            ValueError: the engine rejects the prompt.
        """
        self._require("generative", "/v1/chat/completions", body.model)
        max_tokens = body.max_completion_tokens or body.max_tokens
        prompt = self._prompt(body)
        if max_tokens is None:
            max_tokens = max(1, (self.engine.max_length or len(prompt) + 512) - len(prompt))
        params = SamplingParams(max_tokens=max_tokens, **body.model_dump(include=set(SamplingOptions.model_fields)))
        generation = await self.engine.generate(prompt, params)
        choice = {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": self.tokenizer.decode(generation.token_ids, skip_special_tokens=True),
            },
            "logprobs": None,
            "finish_reason": generation.finish_reason,
        }
        answer = envelope("chatcmpl", "chat.completion", self.name, len(prompt), len(generation.token_ids))
        return answer | {"choices": [choice]}

    async def classify(self, body: ClassifyRequest) -> dict[str, Any]:
        """Answer a classification request with the logits of a text or a conversation.

        Raises:
            ApiError: the model is not discriminative or has another name, or the request is not valid.
            ValueError: the engine rejects the input.
        """
        self._require("discriminative", "/classify", body.model)
        ids = self._prompt(body) if body.input is None else self.tokenizer(body.input)["input_ids"]
        logits = await self.engine.classify(ids)
        label = self.config.id2label.get(max(range(len(logits)), key=logits.__getitem__))
        data = [{"index": 0, "label": label, "probs": logits, "num_classes": len(logits)}]
        return envelope("classify", "list", self.name, len(ids), 0) | {"data": data}

    def _read(self) -> Any:
        """Return the model of the directory, in float32 and eval mode."""
        auto = (
            transformers.AutoModelForCausalLM
            if self.kind == "generative"
            else transformers.AutoModelForSequenceClassification
        )
        model, info = auto.from_pretrained(self._path, dtype=torch.float32, output_loading_info=True)
        # transformers would initialise them randomly.
        if missing := info["missing_keys"]:
            raise ConfigError(
                f"{self._path} has no weights for {listing(missing)} of {type(model).__name__}: the embedded server "
                "supports only models with transformers' own heads. Use vLLM or SGLang"
            )
        return model.eval()

    def _require(self, kind: ModelKind, path: str, model: str | None) -> None:
        if self.kind != kind:
            raise ApiError(404, f"the model `{self.name}` is {self.kind} and does not support {path}")
        if model is not None and model != self.name:
            raise ApiError(404, f"The model `{model}` does not exist; this server has `{self.name}`.", param="model")

    def _prompt(self, body: ChatRequest | ClassifyRequest) -> list[int]:
        """Return the token ids of the conversation, formatted with the model's chat template."""
        try:
            text = self.tokenizer.apply_chat_template(
                [message.as_dict() for message in body.messages or ()],
                add_generation_prompt=isinstance(body, ChatRequest),
                tokenize=False,
                **body.chat_template_kwargs,
            )
        # A chat template may raise any exception for messages that it does not support.
        except Exception as error:
            raise ApiError(400, f"the chat template rejected the messages: {error}", param="messages") from error
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    ids: set[int] = set()
    # The token that ends a turn of a chat may be in one of them only, often in the generation config.
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        eos = getattr(source, "eos_token_id", None)
        ids.update([eos] if isinstance(eos, int) else eos or ())
    return sorted(ids)
