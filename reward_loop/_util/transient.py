"""Classifies exceptions: whether a retry may succeed, whether the service is overloaded, and how long to wait."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reward_loop._util.refusals import REFUSAL_STATUS, asked_pause, is_out_of_credit, retry_after_seconds

__all__ = ["is_refusal", "is_transient", "out_of_credit", "retry_after", "retry_after_seconds", "status_of"]

REQUEST_BREAKS_SERVERS = "request_breaks_servers"
"""The ``code`` of the router's error answer to a request that broke several servers. Nothing repeats such a request."""

TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
"""Transient in addition to 5xx: request timeout, conflict, too early, too many requests. The clients of OpenAI and
Anthropic retry these, except 425."""

_TRANSIENT = {
    "aiohttp": {"ClientConnectionError", "ClientPayloadError"},
    "asyncio": {"IncompleteReadError"},
    "httpx": {"TransportError"},
    "httpcore": {"NetworkError", "TimeoutException", "RemoteProtocolError"},
    "openai": {"APIConnectionError"},
    "anthropic": {"APIConnectionError"},
    "requests": {"ConnectionError", "Timeout", "ChunkedEncodingError"},
    "urllib3": {"ProtocolError", "TimeoutError", "NewConnectionError"},
    "http": {"IncompleteRead", "RemoteDisconnected"},
}
"""By package, the exception classes of broken connections; subclasses count too. They are named as text, so that none
of these packages is imported."""

_PERMANENT = {
    "aiohttp": {"ClientConnectorCertificateError", "ClientSSLError", "InvalidURL"},
    "httpx": {"UnsupportedProtocol", "LocalProtocolError"},
    "requests": {"SSLError"},
    "ssl": {"SSLCertVerificationError"},
}
"""Exception classes that a retry does not change, although some of them are subclasses of those in `_TRANSIENT`."""


def is_transient(error: BaseException) -> bool:
    """Return whether a retry of the call may succeed.

    The error and the errors that it was raised from (``raise ... from``) are examined together. The first attribute
    ``transient`` decides; without one, the first HTTP status decides; without a status, the types decide, and a
    permanent type overrules a transient one. A group of exceptions, as of `asyncio.TaskGroup`, is transient if all of
    them are.
    """
    causes = list(_causes(error))
    if out_of_credit(error):
        return False
    for cause in causes:
        transient = _attribute(cause, "transient")  # TransientError and RequestError have it
        if isinstance(transient, bool):
            return transient
    for cause in causes:
        if isinstance(cause, BaseExceptionGroup):
            return all(map(is_transient, cause.exceptions))
    status = status_of(error)
    if status is not None:
        return status in TRANSIENT_STATUS or 500 <= status <= 599
    if any(_is_one_of(cause, _PERMANENT) for cause in causes):
        return False
    return any(isinstance(cause, ConnectionError | TimeoutError) or _is_one_of(cause, _TRANSIENT) for cause in causes)


def out_of_credit(error: BaseException) -> bool:
    """Return whether a service answered that its account has no credit left: every other call would fail, too."""
    return any(
        is_out_of_credit(_status(cause), _texts(cause)) or any(map(out_of_credit, _parts(cause)))
        for cause in _causes(error)
    )


def is_refusal(error: BaseException) -> bool:
    """Return whether the service answered that it is overloaded. Adaptive limits shrink on such answers."""
    return any(_status(cause) in REFUSAL_STATUS or any(map(is_refusal, _parts(cause))) for cause in _causes(error))


def status_of(error: BaseException) -> int | None:
    """Return the first HTTP status of the error and the errors that it was raised from; ``None`` without one."""
    for cause in _causes(error):
        for status in (_status(cause), *map(status_of, _parts(cause))):
            if status is not None:
                return status
    return None


def retry_after(error: BaseException) -> float | None:
    """Return the seconds that the service asked to wait, by an attribute ``retry_after`` or a ``Retry-After`` header.

    ``None`` if the service did not ask, or the value is not valid. Of a group of exceptions, the longest time counts.
    """
    for cause in _causes(error):
        if asked := [seconds for part in _parts(cause) if (seconds := retry_after(part)) is not None]:
            return max(asked)
        own = _attribute(cause, "retry_after")
        if isinstance(own, int | float) and not isinstance(own, bool) and abs(own) <= sys.float_info.max:
            return max(0.0, float(own))
        response = _attribute(cause, "response")
        for headers in (_attribute(cause, "headers"), _attribute(response, "headers")):
            if _attribute(headers, "get") is not None:
                seconds = _seconds(headers, status_of(error))
                if seconds is not None:
                    return seconds
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and the errors that it was raised from (``raise ... from error``)."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        # urllib's URLError has its cause in `reason`.
        reason = _attribute(error, "reason")
        error = error.__cause__ or (reason if isinstance(reason, BaseException) else None)


def _parts(error: BaseException) -> Sequence[BaseException]:
    """Return the exceptions in a group; of other exceptions, nothing."""
    return error.exceptions if isinstance(error, BaseExceptionGroup) else ()


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute; ``None`` if it is missing, or if it is a property that raises."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def _status(error: BaseException) -> int | None:
    response = _attribute(error, "response")
    for owner, name in (
        (error, "status_code"),
        (error, "status"),
        (response, "status_code"),
        (response, "status"),
        (error, "code"),  # urllib's HTTPError
    ):
        status = _attribute(owner, name)
        if isinstance(status, int) and 100 <= status <= 599:
            return int(status)
    return None


def _is_one_of(error: BaseException, names: Mapping[str, set[str]]) -> bool:
    return any(cls.__name__ in names.get(cls.__module__.partition(".")[0], ()) for cls in type(error).__mro__)


def _seconds(headers: Any, status: int | None) -> float | None:
    with contextlib.suppress(Exception):  # headers of unknown types: an error here must not hide the user's error
        return asked_pause(headers, status)
    return None


def _texts(error: BaseException) -> str:
    """Return the message of an error, with the body of the answer if the client keeps it."""
    response = _attribute(error, "response")
    parts = (error, _attribute(error, "body"), _attribute(response, "text"))  # openai and anthropic; httpx, requests
    with contextlib.suppress(Exception):
        return "\n".join(str(part) for part in parts if part is not None and not callable(part))
    return ""
