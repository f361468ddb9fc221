"""Classifies exceptions: whether a retry may succeed, whether the service is overloaded or away, how long to wait."""

from __future__ import annotations

import contextlib
import errno
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from reward_loop._util.retry_after import REFUSAL_STATUS, asked_pause, is_incurable, is_out_of_credit


class RouterCode(StrEnum):
    """The ``code`` of an error answer of the router, by which clients recognise its cause."""

    NO_SERVER_UP = "no_server_up"
    """No server is up: an outage."""
    REQUEST_BREAKS_SERVERS = "request_breaks_servers"
    """The request broke several servers. Nothing repeats such a request."""


TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
"""Transient in addition to 5xx: request timeout, conflict, too early, too many requests. The clients of OpenAI and
Anthropic retry these, except 425."""

_TRANSIENT = {
    "aiohttp": {"ClientConnectionError"},
    "httpx": {"TransportError"},
    "httpcore": {"TimeoutException"},
    "openai": {"APIConnectionError"},
    "anthropic": {"APIConnectionError"},
    "requests": {"Timeout"},
    "urllib3": {"TimeoutError"},
}
"""By package, the exception classes of broken connections, in addition to `_UNREACHABLE`; subclasses count too. They
are named as text, so that none of these packages is imported."""

_PERMANENT = {
    "aiohttp": {"ClientConnectorCertificateError", "ClientSSLError", "InvalidURL"},
    "httpx": {"UnsupportedProtocol", "LocalProtocolError"},
    "requests": {"SSLError"},
    "ssl": {"SSLCertVerificationError"},
}
"""Exception classes that a retry does not change, although some of them are subclasses of those in `_TRANSIENT`."""


_UNREACHABLE = {
    "aiohttp": {
        *("ClientConnectorError", "ClientOSError", "ConnectionTimeoutError"),
        *("ServerDisconnectedError", "ClientPayloadError"),
    },
    "asyncio": {"IncompleteReadError"},
    "httpx": {"NetworkError", "ConnectTimeout", "ProxyError", "RemoteProtocolError"},
    "httpcore": {"NetworkError", "ConnectTimeout", "ProxyError", "RemoteProtocolError"},
    "requests": {"ConnectionError", "ConnectTimeout", "ChunkedEncodingError"},
    "urllib3": {"NewConnectionError", "ConnectTimeoutError", "ProtocolError"},
    "http": {"IncompleteRead", "RemoteDisconnected"},
    "socket": {"gaierror"},
}
"""The exception classes of servers that cannot be connected to, or end the connection without an answer."""

_UNREACHABLE_ERRNO = frozenset(
    {
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT),
        *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ENETRESET),
    }
)

_LOST = (ConnectionRefusedError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
"""Not `ConnectionError` itself, which no system call raises: functions raise it for errors of their own."""


def unreachable(error: BaseException) -> str | None:
    """Return the address of the server that could not be reached; ``None`` if the error has another cause.

    Unreachable are servers that refuse or reset connections, hosts without an address or a route, and connections that
    are not established in time. An answer, even an error, is none of these; nor is an answer that takes too long. The
    address is ``""`` if the error does not have it. A group of exceptions counts if one of its parts does, and a retry
    of the others may succeed.
    """
    causes = list(_causes(error))
    for cause in causes:
        address = _attribute(cause, "unreachable")
        if isinstance(address, str):
            return address
        # An error that classifies itself, such as a `TransientError`, is not an outage.
        if isinstance(_attribute(cause, "transient"), bool):
            return None
    for cause in causes:
        if isinstance(cause, BaseExceptionGroup):
            found = [address for part in cause.exceptions if (address := unreachable(part)) is not None]
            return found[0] if found and is_transient(cause) else None
    # A proxy that refuses to connect, such as with status 403: its answer is not that of the server.
    is_proxy = any(_is_one_of(cause, {"aiohttp": {"ClientHttpProxyError"}}) for cause in causes)
    if is_proxy and status_of(error) != 407:  # 407: the proxy wants a password
        return address_of(error)
    if status_of(error) is not None or not any(map(_is_unreachable, causes)):
        return None
    if any(_is_one_of(cause, _PERMANENT) for cause in causes) and not any(map(_is_cut_off, causes)):
        return None
    return address_of(error)


def model_of(error: BaseException) -> str | None:
    """Return the model that a failed request of `reward_loop.client` asked, ``""`` if it named none.

    ``None`` for the errors of other clients.
    """
    models = (_attribute(cause, "asked_model") for cause in _causes(error))
    return next((model for model in models if isinstance(model, str)), None)


def _is_unreachable(error: BaseException) -> bool:
    if isinstance(error, OSError):
        # asyncio joins the errors of a host's addresses, such as ::1 and 127.0.0.1, in a text.
        joined = re.findall(r"\[Errno (\d+)\]", str(error)) if error.errno is None and type(error) is OSError else ()
        if error.errno in _UNREACHABLE_ERRNO or (joined and all(int(one) in _UNREACHABLE_ERRNO for one in joined)):
            return True
    return isinstance(error, _LOST) or _is_one_of(error, _UNREACHABLE) or _is_cut_off(error)


def _is_cut_off(error: BaseException) -> bool:
    """Return whether a TLS connection ended within the handshake. Other TLS errors are permanent."""
    return type(error).__name__ in ("SSLEOFError", "SSLZeroReturnError")


def address_of(error: BaseException) -> str:
    """Return the server that an error of a client is about, as ``scheme://host:port``; ``""`` if the error has none."""
    for cause in _causes(error):
        for owner, name in ((_attribute(cause, "request"), "url"), (_attribute(cause, "request_info"), "real_url")):
            if (url := _attribute(owner, name)) is not None:
                parts = urlsplit(str(url))
                # Without user and password: the address is shown in logs.
                return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        host, port = _attribute(cause, "host"), _attribute(cause, "port")
        if isinstance(host, str) and isinstance(port, int):
            return f"{host}:{port}"
    return ""


def _breaks_servers(error: BaseException) -> bool:
    """Return whether the router refused the request for good. Each client keeps the body of an answer elsewhere."""
    body = _attribute(error, "body")  # openai
    read = _attribute(_attribute(error, "response"), "json")
    with contextlib.suppress(Exception):  # a coroutine, a body that is not JSON
        body = read() if body is None and callable(read) else body
    return error_code(body) == RouterCode.REQUEST_BREAKS_SERVERS


def error_code(answer: Any) -> Any:
    """Return the ``code`` of a decoded error answer, as in ``{"error": {"code": ...}}``; ``None`` without one."""
    error = answer.get("error") if isinstance(answer, Mapping) else None
    return next((part["code"] for part in (error, answer) if isinstance(part, Mapping) and "code" in part), None)


def is_transient(error: BaseException) -> bool:
    """Return whether a retry of the call may succeed.

    The error and the errors that it was raised from (``raise ... from``) are examined together. The first attribute
    ``transient`` decides; without one, the first HTTP status decides; without a status, the types decide, and a
    permanent type overrules a transient one. A group of exceptions, as of `asyncio.TaskGroup`, is transient if all of
    them are.
    """
    causes = list(_causes(error))
    # First: many such answers have status 429, which is transient otherwise.
    if out_of_credit(error) or any(is_incurable(_status(cause), _texts(cause)) for cause in causes):
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
        return (status in TRANSIENT_STATUS or 500 <= status <= 599) and not any(map(_breaks_servers, causes))
    if any(_is_one_of(cause, _PERMANENT) for cause in causes) and not any(map(_is_cut_off, causes)):
        return False
    return any(
        isinstance(cause, ConnectionError | TimeoutError) or _is_one_of(cause, _TRANSIENT) or _is_unreachable(cause)
        for cause in causes
    )


def out_of_credit(error: BaseException) -> bool:
    """Return whether a service answered that its account has no credit left: every other call would fail, too."""
    for cause in _causes(error):
        known = _attribute(cause, "out_of_credit")  # RemoteError has it; its text contains lines of code
        if known if isinstance(known, bool) else is_out_of_credit(_status(cause), _texts(cause)):
            return True
        if any(map(out_of_credit, _parts(cause))):
            return True
    return False


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
                seconds = _seconds(headers, status_of(error), _texts(cause))
                if seconds is not None:
                    return seconds
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and the errors that it was raised from (``raise ... from error``)."""
    # Causes may form a circle. `__context__` is not followed: an error in an `except` block is not the error that the
    # block handles.
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
    # Such as `request` of httpx's errors, if no request is set.
    except Exception:
        return None


def _status(error: BaseException) -> int | None:
    response = _attribute(error, "response")
    for owner, name in (
        (error, "status_code"),
        (error, "status"),
        (response, "status_code"),
        (response, "status"),
        # aiohttp warns at each look at its deprecated `code`.
        (None if type(error).__module__.startswith("aiohttp") else error, "code"),  # urllib's HTTPError
    ):
        status = _attribute(owner, name)
        if isinstance(status, int) and 100 <= status <= 599:
            return int(status)
    return None


def _is_one_of(error: BaseException, names: Mapping[str, set[str]]) -> bool:
    # openai 3 has its own copies of httpx and httpcore, httpx2 and httpcore2.
    packages = [(cls.__name__, cls.__module__.partition(".")[0].removesuffix("2")) for cls in type(error).__mro__]
    return any(name in names.get(package, ()) for name, package in packages)


def _seconds(headers: Any, status: int | None, text: str) -> float | None:
    with contextlib.suppress(Exception):  # headers of unknown types: an error here must not hide the user's error
        return asked_pause(headers, status, text)
    return None


def _texts(error: BaseException) -> str:
    """Return the message of an error, with the body of the answer if the client keeps it."""
    response = _attribute(error, "response")
    parts = (error, _attribute(error, "body"), _attribute(response, "text"))  # openai and anthropic; httpx, requests
    with contextlib.suppress(Exception):
        return "\n".join(str(part) for part in parts if part is not None and not callable(part))
    return ""
