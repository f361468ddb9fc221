import asyncio
import socket
import ssl
import types
import urllib.error

import aiohttp
import httpx
import pytest
from multidict import CIMultiDict
from yarl import URL

from reward_loop._util.transient import is_refusal, is_transient, retry_after, unreachable
from reward_loop.errors import RequestError, TransientError

REQUEST = httpx.Request("POST", "http://judge")
INFO = aiohttp.RequestInfo(URL("http://judge"), "POST", CIMultiDict(), URL("http://judge"))


def aiohttp_status(status, **headers):
    return aiohttp.ClientResponseError(INFO, (), status=status, headers=CIMultiDict(headers))


def httpx_status(status, **headers):
    return httpx.HTTPStatusError("no", request=REQUEST, response=httpx.Response(status, headers=headers))


class APIConnectionError(Exception):
    pass


class APITimeoutError(APIConnectionError):
    pass


APIConnectionError.__module__ = "openai"


class APIStatusError(Exception):
    """As the clients of OpenAI and Anthropic have it."""

    def __init__(self, status, **headers):
        self.response = httpx.Response(status, headers=headers)
        self.status_code = status


def raised_from(cause, error=None):
    error = error or RuntimeError("the judge failed")
    error.__cause__ = cause
    return error


def with_context(context):
    error = ValueError("bad JSON")
    error.__context__ = context
    return error


class FailingAttributes(Exception):
    """An exception whose properties raise, as some clients' do before a response exists."""

    def _raise(self):
        raise RuntimeError("no response yet")

    transient = status = status_code = code = response = headers = retry_after = reason = property(_raise)


def group(*errors):
    return ExceptionGroup("unhandled errors in a TaskGroup", errors)


class FailingHeaders(Exception):
    headers = types.SimpleNamespace(get=lambda name: 1 / 0)


TRANSIENT = [
    ConnectionResetError(),
    TimeoutError(),
    asyncio.IncompleteReadError(b"", 1),
    aiohttp.ServerDisconnectedError(),
    aiohttp.ClientPayloadError(),
    httpx.ReadTimeout("no"),
    APITimeoutError(),
    urllib.error.URLError(ConnectionRefusedError()),
    TransientError("the judge is warming up"),
    RequestError("no answer", status=503),
    *(aiohttp_status(status) for status in (408, 409, 425, 429, 500, 503)),
    httpx_status(429),
    APIStatusError(529),
    raised_from(httpx_status(503), ValueError("bad reply")),
    raised_from(httpx_status(503), httpx.UnsupportedProtocol("no")),
    raised_from(httpx_status(401), TransientError("the key is about to be renewed")),
]
PERMANENT = [
    RequestError("not found", status=404),
    ValueError("no"),
    aiohttp_status(400),
    httpx_status(401),
    raised_from(httpx_status(403)),
    aiohttp.InvalidURL("http//judge"),
    httpx.UnsupportedProtocol("no"),
    SystemExit(1),
    raised_from(httpx_status(401), ConnectionError("judge")),
    raised_from(RequestError("not found", status=404), TimeoutError("judge")),
    raised_from(raised_from(ssl.SSLCertVerificationError()), httpx.ConnectError("no")),
    raised_from(httpx.UnsupportedProtocol("no"), ConnectionError("judge")),
    FailingAttributes(),
    FailingHeaders(),
    with_context(ConnectionResetError()),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_transient_errors(error):
    assert is_transient(error)


KEY = types.SimpleNamespace(host="judge", port=443, is_ssl=True, ssl=True)
JOINED = "Multiple exceptions: [Errno 111] Connect call failed ('::1', 1, 0, 0), [Errno {}] x"


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (socket.gaierror(-3, "Temporary failure in name resolution"), True),
        (OSError(113, "No route to host"), True),
        (OSError(JOINED.format(111)), True),  # of asyncio, for a host with two addresses
        (OSError(JOINED.format(24)), False),
        (OSError("the model wrote [Errno]"), False),
        (OSError(24, "Too many open files"), False),
        (aiohttp.ClientConnectorCertificateError(KEY, ssl.SSLCertVerificationError(1, "self-signed")), False),
    ],
    ids=repr,
)
@pytest.mark.parametrize("wrap", [lambda error: error, lambda error: ExceptionGroup("", [error])])
def test_servers_that_cannot_be_reached(error, away, wrap):
    assert (unreachable(wrap(error)) is not None, is_transient(wrap(error))) == (away, away)


@pytest.mark.parametrize("error", PERMANENT, ids=repr)
def test_errors_that_are_not_transient(error):
    assert not is_transient(error)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (aiohttp_status(429, **{"Retry-After": "7"}), 7),
        (httpx_status(503, **{"retry-after": "1.5"}), 1.5),
        (APIStatusError(429, **{"retry-after-ms": "250", "retry-after": "1"}), 0.25),
        (raised_from(APIStatusError(429, **{"retry-after": "2"})), 2),
        (TransientError("later", retry_after=3), 3),
        (TransientError("never", retry_after=10**400), None),
        (aiohttp_status(429, **{"Retry-After": "soon"}), None),
        (aiohttp_status(429), None),
        (FailingAttributes(), None),
        (FailingHeaders(), None),
        (group(httpx_status(429, **{"Retry-After": "3"}), ValueError(), httpx_status(503, **{"Retry-After": "7"})), 7),
    ],
    ids=repr,
)
def test_retry_after(error, seconds):
    assert retry_after(error) == seconds


@pytest.mark.parametrize(
    ("error", "transient", "refusal"),
    [
        (group(httpx_status(503)), True, False),
        (group(ConnectionError(), group(httpx_status(429))), True, True),
        (group(httpx_status(503), ValueError("a bug")), False, False),
        (group(httpx_status(400), httpx_status(429)), False, True),
        (raised_from(group(TimeoutError())), True, False),
        (TransientError("as the function says"), True, False),
        (raised_from(httpx_status(429)), True, True),
    ],
)
def test_a_group_is_transient_if_all_its_errors_are(error, transient, refusal):
    assert (is_transient(error), is_refusal(error)) == (transient, refusal)
