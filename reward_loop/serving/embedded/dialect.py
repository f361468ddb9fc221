"""Request bodies and errors of the part of vLLM's HTTP API that the embedded server supports."""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError, model_validator


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


class SamplingOptions(BaseModel):
    """The sampling parameters that a request and its generation have in common, as in vLLM."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """0 decodes greedily."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """-1 or 0 disables top-k sampling."""
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Applies to the tokens of prompt and response, before the temperature."""
    stop_token_ids: tuple[int, ...] = ()
    """End tokens in addition to those of the engine."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Seeds a random stream for the response: the same seed draws the same random numbers in every batch."""


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
