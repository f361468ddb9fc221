"""Scores from discriminative reward models and rerankers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reward_loop.client.chat import book_usage
from reward_loop.client.fence import leading_control_token, without_control_tokens
from reward_loop.client.http import Timeout, post, repeated
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
        # Broken up, a template of the caller would be scored as text.
        if not templated and (token := leading_control_token(text)):
            raise ConfigError(
                f"classify: the text begins with {token!r}, a control token of a chat template: pass messages, or "
                "templated=True with without_control_tokens(response) in the template"
            )
        kept = text if templated else _plain(text)
        given: dict[str, Any] = {"input": kept, "text": kept}
    else:
        given = {"messages": _plain(text)}
    body = {**given, "use_activation": False, **({"model": model} if model else {})}
    # Not SGLang's `/v1/classify`, which applies softmax: the score of a single label would always be 1.
    logits = await _asked(address, "/classify", body, _logits, timeout=timeout, api_key_env=api_key_env)
    return logits[0] if len(logits) == 1 else logits


def _plain(given: Any) -> Any:
    """Return a text, or the texts of messages and lists, without control tokens."""
    if isinstance(given, str):
        return without_control_tokens(given)
    if isinstance(given, Mapping):
        return {name: _plain(value) if name in ("content", "text") else value for name, value in given.items()}
    return [_plain(one) for one in given] if isinstance(given, list | tuple) else given


async def _asked(
    address: str | None, path: str, body: Mapping[str, Any], read: Callable[[Any], list[float]], **options: Any
) -> list[float]:
    """Return what `read` finds in the answer to a request. The options are those of `post`."""

    async def once() -> list[float]:
        async with post(address, path, body, **options) as (answer, exchange):
            book_usage(answer, exchange)
            try:
                values = read(answer)
            except (LookupError, TypeError, ValueError, OverflowError, AttributeError):
                raise exchange.failed(address, "without logits or scores", answer) from None
            exchange.end(verdict=values, score=values[0] if len(values) == 1 else None)
            return values

    return await repeated(once, address)


def _logits(answer: Any) -> list[float]:
    """Return the logits in an answer of vLLM, or of SGLang, whose field is `embedding`."""
    found = answer["data"][0]["probs"] if "data" in answer else answer["embedding"]
    return [float(logit) for logit in found]


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

    def scores(answer: Any) -> list[float]:
        # vLLM, Jina and Cohere send a mapping with `results`, SGLang a list of results.
        results = answer["results"] if isinstance(answer, Mapping) else answer
        by_index = {
            int(result["index"]): float(result["relevance_score" if "relevance_score" in result else "score"])
            for result in results
        }
        return [by_index[index] for index in range(len(documents))]

    return await _asked(address, "/v1/rerank", body, scores, timeout=timeout, api_key_env=api_key_env)
