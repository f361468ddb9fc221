"""Chat completions from generative models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from reward_loop.client.http import Exchange, Timeout, post, repeated
from reward_loop.errors import ConfigError
from reward_loop.limits.call import book_tokens

_COMPLETE = frozenset({"stop", "eos", "tool_calls"})  # "eos" is what Together calls the end of the text
_LONE_SURROGATES = re.compile(r"[\ud800-\udfff]")

Prompt = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Usage:
    """The number of tokens of a request and its reply, as the server reports them; 0 if it does not."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.prompt_tokens + other.prompt_tokens, self.completion_tokens + other.completion_tokens)


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of a generative model."""

    text: str
    """The text of the reply, without reasoning that the server returns separately; empty if there is none."""
    finish_reason: str | None = None
    """``stop`` if the model ended the reply, ``length`` if it reached the token limit; servers may use other values.
    ``refusal`` and ``error`` if the server sends one of these beside the text.
    ``None`` if the server gives none: in the protocol, that is a reply that has not ended."""
    usage: Usage = Usage()
    """The number of tokens used."""
    logprobs: Sequence[Mapping[str, Any]] | None = None
    """With ``logprobs=True``: a mapping with ``token``, ``logprob`` and ``top_logprobs`` for each token; ``None`` if
    the server sends another form."""
    reasoning: str | None = None
    """The reasoning, if the server returns it separately."""
    model: str | None = None
    """The name of the model, as the server reports it."""

    @property
    def cut_off(self) -> bool:
        """Whether the reply may be incomplete: its finish reason is not ``stop``, ``eos`` or ``tool_calls``."""
        return self.finish_reason not in _COMPLETE


async def chat_complete(
    address: str | None,
    prompt: Prompt,
    *,
    model: str | None = None,
    timeout: Timeout = "model",
    api_key_env: str | None = None,
    **request: Any,
) -> Reply:
    """Send a prompt to a generative model through ``/v1/chat/completions``, and return the reply.

        reply = await chat_complete(reward_router_address, f"Is this correct? {solution_str}", max_tokens=256)
        return 1.0 if reply.text.strip() == "yes" else 0.0

    Args:
        address: ``host:port`` as in ``reward_router_address``, or the base URL of an OpenAI-compatible service.
        prompt: the user's message, or all messages of a conversation.
        model: the model's name; not needed if the address serves only one model.
        timeout: seconds until the reply is received; ``None`` for no limit but the deadline of the reward function. By
            default those of the model (``reward_model.server.timeout``), or 300.
        api_key_env: the name of the environment variable with the service's API key.
        request: other fields of the request, such as ``temperature``, ``max_tokens``, ``seed``, ``logprobs``,
            ``response_format``. Streaming and several choices (``n``) are not supported.

    Raises:
        RequestError: there is no usable answer; see its ``status``, ``retry_after`` and ``transient``.
        ConfigError: the address is missing or invalid, the API key is not set, or a field is not supported.
    """
    options = {"timeout": timeout, "api_key_env": api_key_env}
    reply, exchange = await repeated(lambda: complete(address, prompt, model, options, request), address)
    exchange.end()
    return reply


async def complete(
    address: str | None,
    prompt: Prompt,
    model: str | None,
    options: Mapping[str, Any],
    request: Mapping[str, Any],
) -> tuple[Reply, Exchange]:
    """Do what `chat_complete` does, and also return the exchange, which the caller must `end`.

    Args:
        address, prompt, model, request: see `chat_complete`.
        options: the other arguments of `post`.
    """
    if request.get("stream") or request.get("n", 1) != 1:
        raise ConfigError("chat_complete returns one complete reply: remove `stream` and `n`")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    body = {"messages": messages, **({"model": model} if model else {}), **request}
    async with post(address, "/v1/chat/completions", body, **options) as (answer, exchange):
        return _reply(address, answer, exchange, model), exchange


def _reply(address: str | None, answer: Any, exchange: Exchange, model: str | None) -> Reply:
    """Book the usage, and return the reply in an answer."""
    # First: an answer without a usable reply has cost tokens, too.
    usage = book_usage(answer, exchange)
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        content, reasoning = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
        parts = content if isinstance(content, list) else []
        refuses = message.get("refusal") or any(part.get("type") == "refusal" for part in parts)
        # A service may send text beside its refusal, or beside the error that ended the reply.
        unfinished = "refusal" if refuses else "error" if choice.get("error") or answer.get("error") else None
        reply = Reply(
            text=_text(content) or "",
            finish_reason=unfinished or _text(choice.get("finish_reason")),
            usage=usage,
            logprobs=_logprobs(choice.get("logprobs")),
            reasoning=_text(reasoning) if isinstance(reasoning, str) else None,  # no score depends on it
            model=_text(answer.get("model")),
        )
    except (KeyError, IndexError, TypeError, AttributeError):
        raise exchange.failed(address, "without a reply in text", answer) from None
    if reply.finish_reason == "abort":  # the server has ended the request, for example to restart
        raise exchange.failed(address, "that it has aborted", answer)
    exchange.is_complete = reply.finish_reason not in (None, "error")
    exchange.update(reply=reply.text, finish_reason=reply.finish_reason, model=reply.model or model)
    return reply


def _text(value: Any) -> str | None:
    """Return a text; ``None`` if there is none.

    Raises:
        KeyError, TypeError, AttributeError: it is something else.
    """
    if value is None:
        return None
    if isinstance(value, list):  # of parts, some of which may be the reasoning
        value = "".join(part["text"] for part in value if part.get("type", "text") in ("text", "output_text"))
    return _LONE_SURROGATES.sub("\ufffd", value)  # they cannot be encoded


def _logprobs(given: Any) -> Sequence[Mapping[str, Any]] | None:
    tokens = given.get("content") if isinstance(given, Mapping) else None
    is_known = isinstance(tokens, list) and all(isinstance(token, Mapping) for token in tokens)
    return tokens if is_known else None


def book_usage(answer: Any, exchange: Exchange) -> Usage:
    """Return the token usage that an answer reports, and add it to the held limits and the budget.

    Args:
        answer: the decoded JSON answer. SGLang's have the counts in `meta_info`, its rerankers' in that of each result.
        exchange: the exchange, which adds the usage to the record of the sample.
    """
    usage = sum(map(_usage, answer if isinstance(answer, list) else [answer]), Usage())
    book_tokens(usage.prompt_tokens + usage.completion_tokens)
    exchange.update(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)
    return usage


def _usage(answer: Any) -> Usage:
    given = (answer.get("usage") or answer.get("meta_info")) if isinstance(answer, Mapping) else None
    counts = given if isinstance(given, Mapping) else {}
    details = counts.get("completion_tokens_details")
    reasoning = details if isinstance(details, Mapping) else counts
    prompt = _tokens(counts, "prompt_tokens", "input_tokens")
    completion = _tokens(counts, "completion_tokens", "output_tokens")
    # Some services do not count the reasoning as completion, and say so only by a larger total.
    completion = max(completion, _tokens(reasoning, "reasoning_tokens"))
    rest = max(0, _tokens(counts, "total_tokens") - prompt - completion)
    # Rerankers report only the total.
    return Usage(prompt, completion + rest) if prompt else Usage(rest, completion)


def _tokens(counts: Mapping[str, Any], *names: str) -> int:
    """Return the first count that is a number above 0, also as a text; 0 if there is none."""
    for name in names:
        with suppress(TypeError, ValueError, OverflowError):
            if 0 < (number := float(counts.get(name) or 0)) < 2**53:
                return int(number)
    return 0
