"""Ask a generative model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reward_loop._util.text import shorten
from reward_loop.client.bounds import MAX_REPLY_BYTES
from reward_loop.client.http import post
from reward_loop.errors import ConfigError, RequestError
from reward_loop.limits.lease import book_tokens
from reward_loop.records import current

__all__ = ["Reply", "Usage", "chat_complete", "messages_of"]

_CUT_OFF = frozenset({"length", "content_filter", "abort"})

Prompt = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a request took, as far as the server said."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model wrote."""

    text: str
    """The reply, without reasoning that the server keeps apart; empty if the model wrote none."""
    finish_reason: str | None = None
    """``stop`` if the model ended by itself, ``length`` if it ran out of tokens; others as the server has them."""
    usage: Usage = Usage()
    logprobs: Sequence[Mapping[str, Any]] | None = None
    """With ``logprobs=True``: for each token ``token``, ``logprob`` and ``top_logprobs``."""
    reasoning: str | None = None
    """The reasoning, where the server keeps it apart."""
    model: str | None = None
    """The model that the server says has written it."""
    body: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The whole answer."""

    @property
    def cut_off(self) -> bool:
        """Whether the model could not end its reply: out of tokens, filtered, or aborted."""
        return self.finish_reason in _CUT_OFF


async def chat_complete(
    address: str | None,
    prompt: Prompt,
    *,
    model: str | None = None,
    timeout: float | None = 300.0,
    api_key_env: str | None = None,
    max_reply_bytes: int = MAX_REPLY_BYTES,
    **request: Any,
) -> Reply:
    """Ask a generative model through ``/v1/chat/completions``.

    Args:
        address: ``host:port`` as in ``reward_router_address``, or the base URL of an OpenAI-compatible service.
        prompt: the user's message, or all messages of a conversation.
        model: which model; vLLM, SGLang and the embedded server do not need to be told where they have only one.
        timeout: seconds until the reply must be there; ``None`` for no limit but the reward's own deadline.
        api_key_env: the name of an environment variable that holds the service's API key.
        max_reply_bytes: the longest answer of the server, in bytes after decompression; a longer one is an error.
        request: other fields of the request, such as ``temperature``, ``max_tokens``, ``seed``, ``logprobs``,
            ``response_format``. Streams and several choices (``n``) are not supported.

    Raises:
        RequestError: there is no usable answer; it has ``status``, ``retry_after`` and ``transient``.
        ConfigError: there is no address, or no key, or a field is not supported.
    """
    if request.get("stream") or request.get("n", 1) != 1:
        raise ConfigError("chat_complete gives one whole reply: leave out `stream` and `n`")
    body = {"messages": messages_of(prompt), **({"model": model} if model else {}), **request}
    answer = await post(
        address,
        "/v1/chat/completions",
        body,
        timeout=timeout,
        api_key_env=api_key_env,
        max_reply_bytes=max_reply_bytes,
    )
    usage = book_usage(answer)
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        reply = Reply(
            text=_text(message, "content") or "",
            finish_reason=_text(choice, "finish_reason"),
            usage=usage,
            logprobs=(choice.get("logprobs") or {}).get("content"),
            reasoning=_text(message, "reasoning_content") or _text(message, "reasoning"),
            model=_text(answer, "model"),
            body=answer,
        )
    except _NotTextError as error:
        raise RequestError(f"{address} sent an answer whose {error}", status=200) from None
    except (KeyError, IndexError, TypeError, AttributeError):
        raise RequestError(f"{address} sent an answer without a reply: {shorten(answer, 500)}", status=200) from None
    return reply


class _NotTextError(Exception):
    """A field of an answer is neither text nor null."""


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    raise _NotTextError(f"{name!r} is not text: {shorten(value, 500)}")


def messages_of(prompt: Prompt) -> list[Mapping[str, Any]]:
    """A conversation; text alone is what the user says."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def book_usage(answer: Any, field: str = "usage") -> Usage:
    """Return the tokens that an answer reports, and count them: for the sample, the limits that hold and the budget."""
    counts = answer.get(field) if isinstance(answer, Mapping) else None
    counts = counts if isinstance(counts, Mapping) else {}
    completion = _tokens(counts.get("completion_tokens"))
    # Rerankers report only the total.
    prompt = _tokens(counts.get("prompt_tokens")) or max(0, _tokens(counts.get("total_tokens")) - completion)
    usage = Usage(prompt, completion)
    book_tokens(usage.total_tokens)
    if (call := current()) is not None:
        call.prompt_tokens += usage.prompt_tokens
        call.completion_tokens += usage.completion_tokens
    return usage


def _tokens(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
