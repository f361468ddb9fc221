"""The bodies of vLLM's HTTP interface, as far as the embedded server speaks it."""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, model_validator

__all__ = ["ApiError", "ChatRequest", "ClassifyRequest", "Message", "new_id", "now"]


class ApiError(Exception):
    """Is answered in vLLM's shape: ``{"error": {"message", "type", "param", "code"}}``."""

    def __init__(self, code: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        kind = {404: "NotFoundError", 500: "InternalServerError"}.get(code, "BadRequestError")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Body(BaseModel):
    """Fields that are unknown here are ignored, as vLLM does."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The message as chat templates take it, its content joined to one string."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return {"role": self.role, "content": content}


class ChatRequest(Body):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    logprobs: bool = False
    top_logprobs: int | None = None
    stream: bool = False

    @property
    def stop_strings(self) -> list[str]:
        """The non-empty strings that end a response."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stop if text]


class ClassifyRequest(Body):
    """``POST /classify``: either ``input`` or ``messages``."""

    input: StrictStr | list[StrictInt] | list[StrictStr] | list[list[StrictInt]] | None = None
    messages: list[Message] | None = None
    use_activation: bool | None = None
    add_generation_prompt: bool = False
    """Ends the conversation in ``messages`` with the template's opening of a reply."""
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of(self) -> ClassifyRequest:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give either `input` or `messages`")
        if self.input == [] or self.messages == []:
            raise ValueError("`input` and `messages` must not be empty")
        return self


def new_id(prefix: str) -> str:
    """A fresh identifier for a response."""
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    """Unix time in whole seconds."""
    return int(time.time())
