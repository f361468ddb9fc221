"""Ask a discriminative reward model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reward_loop._util.text import shorten
from reward_loop.client.bounds import MAX_REPLY_BYTES
from reward_loop.client.chat import book_usage
from reward_loop.client.http import post
from reward_loop.errors import RequestError

__all__ = ["classify", "score"]


async def classify(
    address: str | None,
    text: str | Sequence[Mapping[str, Any]],
    *,
    model: str | None = None,
    timeout: float | None = 300.0,
    api_key_env: str | None = None,
    max_reply_bytes: int = MAX_REPLY_BYTES,
) -> float | list[float]:
    """Return the raw logit of a text, or the logits of a model with several labels.

    Args:
        address: ``host:port`` as in ``reward_router_address``, or a base URL.
        text: what to score, its chat template applied; or messages, to which vLLM and the embedded server apply the
            model's own template (SGLang does not).
        model: which model, where there are several.
        timeout: seconds until the answer must be there; ``None`` for no limit but the reward's own deadline.
        api_key_env: the name of an environment variable that holds the API key.
        max_reply_bytes: the longest answer of the server, in bytes after decompression; a longer one is an error.

    Raises:
        RequestError: there is no usable answer; it has ``status``, ``retry_after`` and ``transient``.
        ConfigError: there is no address, or no key.
    """
    # vLLM reads `input`, and gives logits where it is told to leave its activation out. SGLang's native endpoint of
    # that name reads `text`, and gives logits always. Each ignores the fields of the other.
    given = {"input": text, "text": text} if isinstance(text, str) else {"messages": list(text)}
    body = {**given, "use_activation": False, **({"model": model} if model else {})}
    answer = await post(
        address, "/classify", body, timeout=timeout, api_key_env=api_key_env, max_reply_bytes=max_reply_bytes
    )
    book_usage(answer)
    book_usage(answer, "meta_info")  # SGLang
    try:
        logits = answer["data"][0]["probs"] if "data" in answer else answer["embedding"]
        logits = [float(logit) for logit in logits]
        if not logits:
            raise ValueError("no logits")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise RequestError(f"{address} sent an answer without logits: {shorten(answer, 500)}", status=200) from None
    return logits[0] if len(logits) == 1 else logits


async def score(
    address: str | None,
    query: str,
    documents: Sequence[str],
    *,
    model: str | None = None,
    timeout: float | None = 300.0,
    api_key_env: str | None = None,
    max_reply_bytes: int = MAX_REPLY_BYTES,
    **request: Any,
) -> list[float]:
    """Return how well each document answers a query, by a reranking model, through ``/v1/rerank``.

    Args:
        address: ``host:port`` as in ``reward_router_address``, or a base URL.
        query: the question.
        documents: what to score against it.
        model: which model, where there are several.
        timeout: seconds until the answer must be there; ``None`` for no limit but the reward's own deadline.
        api_key_env: the name of an environment variable that holds the API key.
        max_reply_bytes: the longest answer of the server, in bytes after decompression; a longer one is an error.
        request: other fields of the request.

    Returns:
        one score a document, in their order, on the server's scale.

    Raises:
        RequestError: there is no usable answer; it has ``status``, ``retry_after`` and ``transient``.
        ConfigError: there is no address, or no key.
    """
    body = {"query": query, "documents": list(documents), **({"model": model} if model else {}), **request}
    answer = await post(
        address, "/v1/rerank", body, timeout=timeout, api_key_env=api_key_env, max_reply_bytes=max_reply_bytes
    )
    book_usage(answer)
    try:
        # vLLM, Jina and Cohere send a mapping with `results`, SGLang a list of results, each with its tokens.
        results = answer["results"] if isinstance(answer, Mapping) else answer
        if not isinstance(answer, Mapping):
            for result in results:
                book_usage(result, "meta_info")
        scores = {
            int(result["index"]): float(result["relevance_score" if "relevance_score" in result else "score"])
            for result in results
        }
        return [scores[index] for index in range(len(documents))]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RequestError(
            f"{address} sent an answer without a score for each document: {shorten(answer, 500)}", status=200
        ) from None
