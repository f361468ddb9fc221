"""Which failures may pass by themselves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from typing import Any

from reward_loop._util.retry_after import retry_after_seconds

__all__ = ["is_refusal", "is_transient", "retry_after"]

TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
"""Besides 5xx: request timeout, conflict, too early, too many requests. The clients of OpenAI and Anthropic take these
(but 425) for transient."""

REFUSAL_STATUS = frozenset({429, 529})
"""Too many requests; overloaded, as Anthropic says it."""

_TRANSIENT = {
    "aiohttp": {"ClientConnectionError", "ClientPayloadError"},
    "httpx": {"TransportError"},
    "httpcore": {"NetworkError", "TimeoutException", "RemoteProtocolError"},
    "openai": {"APIConnectionError"},
    "anthropic": {"APIConnectionError"},
    "requests": {"ConnectionError", "Timeout", "ChunkedEncodingError"},
    "urllib3": {"ProtocolError", "TimeoutError", "NewConnectionError"},
    "http": {"IncompleteRead", "RemoteDisconnected"},
}
"""By package, the classes whose instances, subclasses included, are connections that broke. They are known by name, so
that none of these packages is needed."""

_PERMANENT = {
    "aiohttp": {"ClientConnectorCertificateError", "ClientSSLError", "InvalidURL"},
    "httpx": {"UnsupportedProtocol", "LocalProtocolError"},
    "requests": {"SSLError"},
    "ssl": {"SSLCertVerificationError"},
}
"""Those among them that will be no different the next time."""


def is_transient(error: BaseException) -> bool:
    """Whether the call may succeed if it is made again.

    An error that says so itself, by an attribute ``transient``, is believed. Else a status code decides, if the error,
    or one that it was raised from, has one; else its type.
    """
    for cause in _causes(error):
        says = getattr(cause, "transient", None)  # as do TransientError and RequestError
        if isinstance(says, bool):
            return says
        status = _status(cause)
        if status is not None:
            return status in TRANSIENT_STATUS or 500 <= status <= 599
        if _is_one_of(cause, _PERMANENT):
            return False
        if isinstance(cause, ConnectionError | TimeoutError | asyncio.IncompleteReadError):
            return True
        if _is_one_of(cause, _TRANSIENT):
            return True
    return False


def is_refusal(error: BaseException) -> bool:
    """Whether the service said that it has too much to do, which is what adaptive limits shrink at."""
    return any(_status(cause) in REFUSAL_STATUS for cause in _causes(error))


def retry_after(error: BaseException) -> float | None:
    """The seconds after which the service asked to be called again, if it did: a number, or a date."""
    for cause in _causes(error):
        own = getattr(cause, "retry_after", None)
        if isinstance(own, int | float) and not isinstance(own, bool) and math.isfinite(own):
            return max(0.0, float(own))
        response = getattr(cause, "response", None)
        for headers in (getattr(cause, "headers", None), getattr(response, "headers", None)):
            if isinstance(headers, Mapping) or hasattr(headers, "get"):
                seconds = _seconds(headers)
                if seconds is not None:
                    return seconds
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it was raised from on purpose (``raise ... from error``)."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        # urllib's URLError keeps what happened in `reason`.
        reason = getattr(error, "reason", None)
        error = error.__cause__ or (reason if isinstance(reason, BaseException) else None)


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    for owner, name in (
        (error, "status_code"),
        (error, "status"),
        (response, "status_code"),
        (response, "status"),
        (error, "code"),  # urllib's HTTPError
    ):
        status = getattr(owner, name, None)
        if isinstance(status, int) and 100 <= status <= 599:
            return int(status)
    return None


def _is_one_of(error: BaseException, names: Mapping[str, set[str]]) -> bool:
    return any(cls.__name__ in names.get(cls.__module__.partition(".")[0], ()) for cls in type(error).__mro__)


def _seconds(headers: Any) -> float | None:
    def header(name: str) -> str | None:
        value = headers.get(name) or headers.get(name.lower())
        return None if value is None else str(value)

    milliseconds = retry_after_seconds(header("Retry-After-Ms"))  # as OpenAI says it
    return retry_after_seconds(header("Retry-After")) if milliseconds is None else milliseconds / 1000
