import asyncio
import email.utils
import socket
import time
import urllib.error

import aiohttp
import httpx
import pytest
from multidict import CIMultiDict
from yarl import URL

from reward_loop.config import RetryConfig
from reward_loop.errors import TransientError
from reward_loop.scoring.retry import Retry, is_refusal, is_transient, retry_after

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


def raised_from(cause):
    error = RuntimeError("the judge failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(),
        TimeoutError(),
        socket.timeout(),  # noqa: UP041
        asyncio.IncompleteReadError(b"", 1),
        aiohttp.ServerDisconnectedError(),
        aiohttp.ClientPayloadError(),
        aiohttp.ServerTimeoutError(),
        httpx.ConnectError("no"),
        httpx.ReadTimeout("no"),
        httpx.RemoteProtocolError("no"),
        APITimeoutError(),
        urllib.error.URLError(ConnectionRefusedError()),
        TransientError("the judge is warming up"),
        *(aiohttp_status(status) for status in (408, 409, 425, 429, 500, 503)),
        httpx_status(429),
        APIStatusError(529),
        raised_from(httpx_status(502)),
    ],
    ids=repr,
)
def test_what_may_pass(error):
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        KeyError("score"),
        aiohttp_status(400),
        aiohttp_status(404),
        httpx_status(401),
        APIStatusError(422),
        raised_from(httpx_status(403)),
        aiohttp.InvalidURL("http//judge"),
        httpx.UnsupportedProtocol("no"),
        httpx.InvalidURL("no"),
        AssertionError(),
        SystemExit(1),
    ],
    ids=repr,
)
def test_what_will_not(error):
    assert not is_transient(error)


def test_an_error_met_while_handling_another_is_not_taken_for_it():
    error = ValueError("bad JSON")
    error.__context__ = ConnectionResetError()
    assert not is_transient(error)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (aiohttp_status(429, **{"Retry-After": "7"}), 7),
        (httpx_status(503, **{"retry-after": "1.5"}), 1.5),
        (APIStatusError(429, **{"retry-after-ms": "250", "retry-after": "1"}), 0.25),
        (raised_from(APIStatusError(429, **{"retry-after": "2"})), 2),
        (TransientError("later", retry_after=3), 3),
        (aiohttp_status(429, **{"Retry-After": "soon"}), None),
        (aiohttp_status(429), None),
        (ValueError(), None),
    ],
    ids=repr,
)
def test_retry_after(error, seconds):
    assert retry_after(error) == seconds


def test_retry_after_a_date():
    date = email.utils.formatdate(time.time() + 1000, usegmt=True)
    assert 900 < retry_after(aiohttp_status(429, **{"Retry-After": date})) <= 1000


def test_refusals():
    assert is_refusal(raised_from(aiohttp_status(429)))
    assert not is_refusal(aiohttp_status(503))


class Pauses:
    def __init__(self):
        self.seconds = []

    async def __call__(self, seconds):
        self.seconds.append(seconds)


async def again(config, outcomes, elapsed=0.0):
    """Errors and results of the attempts; what came of it, and the pauses made."""
    pauses = Pauses()
    outcomes = iter(outcomes)

    async def attempt():
        return next(outcomes)

    def error_of(outcome):
        return outcome if isinstance(outcome, BaseException) else None

    result = await Retry(config, sleep=pauses).again(await attempt(), attempt, error_of, elapsed)
    return result, pauses.seconds


async def test_it_goes_on_until_it_succeeds():
    result, pauses = await again(RetryConfig(), [TimeoutError(), TimeoutError(), 1.0])
    assert result == 1.0
    assert len(pauses) == 2
    assert 0 <= pauses[0] <= 0.5
    assert 0 <= pauses[1] <= 1.0


async def test_after_the_last_attempt_there_is_a_defined_outcome():
    # A retry loop of verl's has no last branch: its result is unbound when all attempts fail.
    last = TimeoutError("the third")
    result, pauses = await again(RetryConfig(max_attempts=3), [TimeoutError(), TimeoutError(), last, 1.0])
    assert result is last
    assert len(pauses) == 2


async def test_an_error_that_will_not_pass_ends_it():
    error = ValueError()
    assert await again(RetryConfig(max_attempts=9), [TimeoutError(), error, 1.0]) == (
        error,
        [pytest.approx(0.25, abs=0.25)],
    )


async def test_retry_after_is_waited_for_in_full():
    config = RetryConfig(max_wait=1, initial_wait=0.5)
    result, pauses = await again(config, [aiohttp_status(429, **{"Retry-After": "30"}), 1.0])
    assert result == 1.0
    assert 30 <= pauses[0] <= 30.5


async def test_no_pause_begins_that_ends_past_the_deadline():
    error = aiohttp_status(429, **{"Retry-After": "30"})
    assert await again(RetryConfig(max_seconds=20), [error, 1.0]) == (error, [])
    assert await again(RetryConfig(max_seconds=100), [error, 1.0], elapsed=80) == (error, [])


async def test_pauses_are_bounded_and_vary():
    config = RetryConfig(max_attempts=50, max_wait=2, max_seconds=10_000)
    _, pauses = await again(config, [TimeoutError()] * 60)
    assert len(pauses) == 49
    assert max(pauses) <= 2
    assert len(set(pauses)) > 40
