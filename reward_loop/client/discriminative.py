"""Scores from discriminative reward models and rerankers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reward_loop.client.chat import book_usage
from reward_loop.client.fence import leading_control_token, without_control_tokens
from reward_loop.client.http import Exchange, Timeout, post, repeated
from reward_loop.errors import ConfigError


async def classify(
    address: str | None,
    text: str | Sequence[Mapping[str, Any]],
    *,
    model: str | None = None,
    templated: bool = False,
    timeout: Timeout = "model",
    api_key_env: str | None = None,
) -> float | list[float]:
    """Return the raw logit of a text, or a list of logits if the model has several labels.

    A server that ignores ``use_activation`` returns probabilities: start it without the activation (vLLM:
    ``--pooler-config '{"use_activation": false}'``).

        logit = await classify(reward_router_address, [{"role": "user", "content": question}, ...])

    Args:
        address: ``host:port`` as in ``reward_router_address``, or a base URL.
        text: the text to score; or messages, to which vLLM and the embedded server apply the model's chat template
            (SGLang does not). Control tokens of chat templates in it are broken up: a response with them would end
            its turn.
        model: the model's name; needed if the address serves several models.
        templated: whether the text has the chat template already, whose control tokens must stay. Use
            `without_control_tokens` for the response before you apply the template.
        timeout: seconds until the answer is received; ``None`` for no limit but the deadline of the reward function. By
            default those of the model (``reward_model.server.timeout``), or 300.
        api_key_env: the name of the environment variable with the API key.

    Raises:
        RequestError: there is no usable answer; see its ``status``, ``retry_after`` and ``transient``.
        ConfigError: the address is missing or invalid, the API key is not set, or the text begins with a control token
            although it is not `templated`.
    """
    # vLLM reads `input`, and returns logits if `use_activation` is false. SGLang's `/classify` reads `text`, and always
    # returns logits. Each ignores the fields of the other.
    if isinstance(text, str):
        kept = text if templated else _plain(_untemplated(text))
        given: dict[str, Any] = {"input": kept, "text": kept}
    else:
        given = {"messages": [_plain(message) for message in text]}
    body = {**given, "use_activation": False, **({"model": model} if model else {})}
    options = {"timeout": timeout, "api_key_env": api_key_env}
    logits = await repeated(lambda: _classify(address, body, options), address)
    return logits[0] if len(logits) == 1 else logits


def _untemplated(text: str) -> str:
    """Refuse a text that begins with a control token: broken up, a template of the caller would be scored as text."""
    if (token := leading_control_token(text)) is not None:
        raise ConfigError(
            f"classify: the text begins with {token!r}, a control token of a chat template: pass messages, or "
            "templated=True with without_control_tokens(response) in the template"
        )
    return text


def _plain(given: Any) -> Any:
    """Return a text, or the texts of messages and lists, without control tokens."""
    if isinstance(given, str):
        return without_control_tokens(given)
    if isinstance(given, Mapping):
        return {name: _plain(value) if name in ("content", "text") else value for name, value in given.items()}
    return [_plain(one) for one in given] if isinstance(given, list | tuple) else given


async def _classify(address: str | None, body: Mapping[str, Any], options: Mapping[str, Any]) -> list[float]:
    # Not SGLang's `/v1/classify`, which applies softmax: the score of a single label would always be 1.
    async with post(address, "/classify", body, **options) as (answer, exchange):
        return _logits(address, answer, exchange)


def _logits(address: str | None, answer: Any, exchange: Exchange) -> list[float]:
    book_usage(answer, exchange)
    book_usage(answer, exchange, "meta_info")  # SGLang
    try:
        found = answer["data"][0] if "data" in answer else answer
        # `probs` of vLLM's /classify, `data` of its /pooling, `score` of its /v1/score, `embedding` of SGLang.
        values = next(found[name] for name in ("probs", "data", "score", "embedding") if name in found)
        while isinstance(values, list) and len(values) == 1 and isinstance(values[0], list):
            (values,) = values
        logits = [float(logit) for logit in (values if isinstance(values, list) else [values])]
        if not logits:
            raise ValueError("no logits")
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError, StopIteration):
        raise exchange.failed(address, "without logits", answer) from None
    exchange.end(verdict=logits, score=logits[0] if len(logits) == 1 else None)
    return logits


async def score(
    address: str | None,
    query: str,
    documents: Sequence[str],
    *,
    model: str | None = None,
    templated: bool = False,
    timeout: Timeout = "model",
    api_key_env: str | None = None,
    **request: Any,
) -> list[float]:
    """Return a reranking model's scores of documents for a query, through ``/v1/rerank``.

        [relevance] = await score(reward_router_address, question, [solution_str])

    Args:
        address: ``host:port`` as in ``reward_router_address``, or a base URL.
        query: the query, such as a question.
        documents: the documents to score, such as answers.
        model: the model's name; needed if the address serves several models.
        templated: whether query and documents have the model's template already: see `classify`.
        timeout: seconds until the answer is received; ``None`` for no limit but the deadline of the reward function. By
            default those of the model (``reward_model.server.timeout``), or 300.
        api_key_env: the name of the environment variable with the API key.
        request: other fields of the request.

    Returns:
        one score for each document, in the order of `documents`, on the server's scale.

    Raises:
        RequestError: there is no usable answer; see its ``status``, ``retry_after`` and ``transient``.
        ConfigError: the address is missing or invalid, or the API key is not set.
    """
    if not templated:
        query, documents = _plain(query), _plain(list(documents))
    body = {"query": query, "documents": list(documents), **({"model": model} if model else {}), **request}
    options = {"timeout": timeout, "api_key_env": api_key_env}
    return await repeated(lambda: _score(address, body, options), address)


async def _score(address: str | None, body: Mapping[str, Any], options: Mapping[str, Any]) -> list[float]:
    async with post(address, "/v1/rerank", body, **options) as (answer, exchange):
        return _scores(address, answer, exchange, len(body["documents"]))


def _scores(address: str | None, answer: Any, exchange: Exchange, number: int) -> list[float]:
    book_usage(answer, exchange)
    try:
        # vLLM, Jina and Cohere send a mapping with `results`, vLLM's /v1/score one with `data`; SGLang sends a list of
        # results, each with token counts.
        results = answer["results" if "results" in answer else "data"] if isinstance(answer, Mapping) else answer
        if not isinstance(answer, Mapping):
            for result in results:
                book_usage(result, exchange, "meta_info")
        scores = {
            int(result["index"]): float(result["relevance_score" if "relevance_score" in result else "score"])
            for result in results
        }
        ordered = [scores[index] for index in range(number)]
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        raise exchange.failed(address, "without a score for each document", answer) from None
    exchange.end(verdict=ordered, score=ordered[0] if len(ordered) == 1 else None)
    return ordered
