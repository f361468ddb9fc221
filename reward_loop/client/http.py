"""HTTP requests to model servers, over one connection pool for each event loop; their records, and their repetition.

A request is sent again after a transient answer; the table in `scoring/retry.py` shows who repeats what.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import re
import resource
import secrets
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from hashlib import blake2b
from typing import Any, Literal, TypeVar
from urllib.parse import quote, unquote, unquote_plus, urlsplit

import aiohttp

from reward_loop._util.addresses import proxy_of, url_of
from reward_loop._util.api_keys import api_key_of
from reward_loop._util.json import decode, encode
from reward_loop._util.retry_after import Backoff, asked_pause, is_incurable, is_out_of_credit
from reward_loop._util.text import shorten
from reward_loop._util.transient import (
    RouterCode,
    error_code,
    is_refusal,
    unreachable,
)
from reward_loop.client.request_cache import RequestCache
from reward_loop.errors import ConfigError, RequestError
from reward_loop.limits.call import Call, call_here, outside_the_deadline, report_answer
from reward_loop.limits.call import limit as limited
from reward_loop.limits.local import OF_MODEL, answer_of
from reward_loop.limits.options import RetryConfig
from reward_loop.limits.outages import JudgeAddress
from reward_loop.records import current, hide, waiting_for
from reward_loop.records.writer import MIN_LENGTH

MAX_REPLY_BYTES = 64 * 1024 * 1024
"""The longest reply, in bytes after decompression."""

_SYN_RETRIES = 3
"""How often the kernel repeats the request for a connection. An address that has not answered after 15 s counts as
unreachable; since Linux 6.5, which first repeats it four times at intervals of a second, after 19 s."""

_KEEPALIVE_S = 3.0  # uvicorn, which vLLM and SGLang run in, closes idle connections after 5 s

Timeout = float | Literal["model"] | None
"""Seconds until an answer is received; ``None`` for no limit, ``model`` for those of the model, or 300."""

T = TypeVar("T")

_NO_CALL = RetryConfig(max_attempts=1)
"""The attempts of a request outside of a reward function."""

_LONGEST_PAUSE_S = 30.0
"""A service that asks for a longer pause is left to the retries of the function, which release all permits."""

_sessions: dict[
    asyncio.AbstractEventLoop, tuple[AsyncGenerator[aiohttp.ClientSession, None], aiohttp.ClientSession]
] = {}


_FULL_STATUS = frozenset({429, 503, 529})
"""The answers of a full server, if they say neither how long to wait nor another cause."""

_MOST_REFUSALS = 10
"""The number of refusals of one request by a full server, after which its last answer counts: the server may refuse it
whatever its load is."""

Answer = tuple[aiohttp.ClientResponse, bytes]

BACKEND_HEADER = "x-reward-loop-backend"
"""The header in which the router names the server that answered."""

GROUP_HEADER = "x-reward-loop-group"
"""The header with a hash of the sample's group, for the router's policy ``affinity``. Services do not receive it."""


SAMPLE_HEADER, ATTEMPT_HEADER = "X-Sample-Uid", "X-Sample-Attempt"
"""The headers with the uid of the sample, percent-encoded, and the number of the call of its function, from 1."""

NO_WAIT_HEADER = "x-reward-loop-no-wait"
"""The header with which the router refuses a request while no server is up: in the router, the deadline would run."""


USUAL_TIMEOUT_S = 300.0
"""The default timeout. The router's own, ``request_timeout_s``, is shorter: its explanation must arrive before."""


@asynccontextmanager
async def post(
    address: str | None,
    path: str,
    body: Mapping[str, Any],
    *,
    limit: str | None = None,
    timeout: Timeout = "model",
    api_key_env: str | None = None,
    cache: RequestCache | None = None,
) -> AsyncIterator[tuple[Any, Exchange]]:
    """Send a JSON body with POST, and yield the decoded JSON answer, and the exchange, which the caller must `end`.

    The permit of the limit is held within the block, in which the caller books the tokens.

    A cancelled request closes its connection, so that the server stops working on it. The connections of an event loop
    use at most half of the file descriptors that the process may open (``ulimit -n``); further requests wait for a
    connection.

    If the connection to a ``host:port`` is lost before the answer is complete, for example because the router was
    killed, the request is sent again, once and within the timeout. Requests to a base URL are not: a service might
    compute, and charge for, the same request twice.

    Args:
        address: ``host:port`` as in ``reward_router_address``, or the base URL of a service.
        path: the endpoint, such as ``/v1/chat/completions``.
        body: the JSON body of the request.
        limit: the name of the limit; by default that of the model, see `ModelConfig`.
        timeout: seconds until the whole answer is received, including the wait for a connection; ``None`` for no
            limit, ``model`` for those of the model, or 300. The router's own time limit is ``request_timeout_s``.
        api_key_env: the name of the environment variable with the service's API key.
        cache: where answers are stored, and looked for first. An answer from there needs no permit. One whose block
            raises, or finds that it is not complete, is not stored.

    Raises:
        RequestError: the request failed or timed out, its status is not 200, or the answer is too long or not JSON.
        ConfigError: the address is missing or invalid, or the environment variable for the API key is not set.
    """
    url = url_of(address, path)
    is_base_url = "://" in (address or "")
    call = None if is_base_url else call_here()
    headers = _headers(call, is_base_url, api_key_env)
    model = body.get("model")
    models_limit, models_timeout = _of_model(call, model)
    limit = limit or models_limit
    if timeout == "model":
        timeout = models_timeout or USUAL_TIMEOUT_S
    if cache is not None and (known := await cache.get(url, body)) is not None:
        stored = Exchange(url, body, api_key_env)
        stored.update(response=known, cached=True)
        yield known, stored
        return
    judge = JudgeAddress(server_of(url), model or "")
    _raise_if_away(url, judge)
    async with nullcontext() if limit is None else limited(limit):
        exchange = Exchange(url, body, api_key_env)
        started = time.perf_counter()
        try:
            answer = await _post(exchange, url, is_base_url, headers, body, timeout)
        except BaseException as error:
            if isinstance(error, RequestError):
                error.args = (exchange.without_secrets(str(error)),)  # a service may repeat the key
                error.asked_model = judge.model
                # Here: if the function catches the error, its own limits would otherwise count an answer.
                report_answer(*answer_of(error))
            exchange.end(seconds=time.perf_counter() - started, error=_cause(error))
            raise
        exchange.update(seconds=time.perf_counter() - started)
        yield answer, exchange
    if cache is not None and exchange.is_complete:
        await cache.put(url, body, answer)


def _of_model(call: Call | None, model: str | None) -> tuple[str | None, float | None]:
    """Return the limit and the deadline of requests to a model; a request that names no model asks the only one."""
    models = {} if call is None else call.limits.options.models
    name = next(iter(models)) if model is None and len(models) == 1 else model
    if name is None or name not in models:
        return None, None
    return OF_MODEL + name if models[name].max_concurrent else None, models[name].timeout


def _raise_if_away(url: str, judge: JudgeAddress) -> None:
    """Raise the error of an outage for a new call, without a request. Calls that the outage lets through may ask.

    Otherwise, each sample that begins in an outage would send a request that fails.
    """
    if (call := call_here()) is not None and call.attempt == 1 and call.limits.outages.is_away(judge):
        error = RequestError(
            f"POST {shown_url(url)} was not sent: {judge} cannot be reached at present", unreachable=judge.address
        )
        error.asked_model = judge.model
        raise error


def server_of(url: str) -> str:
    """Return scheme, host and port of a URL: the name of its server in an outage."""
    return "/".join(shown_url(url).split("/")[:3])


def shown_url(url: str | None) -> str:
    """Return a URL or an address without what may be secret: user, password and query."""
    shown = (url or "").partition("?")[0]
    scheme, separator, rest = shown.rpartition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


_PUBLIC = frozenset({"api-version", "api_version", "version", "model"})
"""The query parameters whose values are not hidden: a version, such as a date, also occurs in ordinary texts. Any other
parameter, such as ``code`` or ``sig``, may contain the key of a service."""


def _secrets(url: str, api_key_env: str | None) -> list[str]:
    """Return the key, and user, password and query values of the URL, as they are sent and as they are written."""
    parts = urlsplit(url)
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    basic = base64.b64encode(f"{user}:{password}".encode()).decode() if user or password else None  # the header's
    values = [value for name, _, value in (one.partition("=") for one in parts.query.split("&")) if name not in _PUBLIC]
    given = [api_key_env and api_key_of(api_key_env), basic, parts.username, parts.password, *values]
    forms = {form.strip() for one in given if one for form in (one, unquote_plus(one))}
    return sorted((form for form in forms if len(form) > 1), key=len, reverse=True)


def _headers(call: Call | None, is_base_url: bool, api_key_env: str | None) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if api_key_env is not None:
        if (key := api_key_of(api_key_env)) is None:
            raise ConfigError(f"the environment variable {api_key_env}, which should hold the API key, is not set")
        headers["authorization"] = f"Bearer {key}"
    if call is not None and call.limits.options.outage_timeout_s:
        headers[NO_WAIT_HEADER] = "1"
    if (active := current()) is None:
        return headers
    if active.sample.group and not is_base_url:
        # A hash: the id of a group may be any text, and a header may not.
        headers[GROUP_HEADER] = blake2b(active.sample.group.encode(errors="replace"), digest_size=8).hexdigest()
    if active.sample.uid is not None:
        # Encoded: a uid may be any text, and a header may not.
        headers[SAMPLE_HEADER] = quote(str(active.sample.uid), safe=" !#$&'()*+,/:;=?@[]", errors="replace")
        headers[ATTEMPT_HEADER] = str(_attempt())
    return headers


def _attempt() -> int:
    call = call_here()
    return 1 if call is None else call.attempt


def _cause(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "cancelled before the answer was complete, for example at the deadline of the function"
    return str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"


async def _post(
    exchange: Exchange,
    url: str,
    is_base_url: bool,
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    timeout: float | None,
) -> Any:
    what = f"POST {shown_url(url)}" + (f" (model {body['model']})" if body.get("model") else "")
    try:
        with waiting_for(current(), what):
            session = await shared_session()
            send = functools.partial(
                session.post,
                url,
                # Not aiohttp's `json=`: it fails on numpy values, and writes NaN, which is not JSON.
                data=encode(body),
                headers=headers,
                proxy=proxy_of(url) if is_base_url else None,  # No proxy for `host:port`: it is in the cluster.
                allow_redirects=False,  # the key is for this address
                # Without `total`, aiohttp ends a request after 300 s, and the timeout may be longer. For connections,
                # see `_socket`.
                timeout=aiohttp.ClientTimeout(total=None),
            )

            async def once() -> Answer:
                async with asyncio.timeout(timeout):
                    try:
                        return await _send_and_read(send)
                    # Also a `ClientOSError`; but there was no connection: an outage, whose end the function waits for.
                    except aiohttp.ClientConnectorError:
                        raise
                    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientPayloadError):
                        if is_base_url:
                            raise
                        # Once: further losses are an outage, see the table in `scoring/retry.py`.
                        return await _send_and_read(send)

            response, data = await _in_a_place(once)
    except TimeoutError as error:
        raise RequestError(f"{what}: no answer within {timeout:g} s") from error
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
        # Not `from error`: its text is the URL, whose secrets a traceback would show.
        raise ConfigError(f"{what}: this is not a valid address; give `host:port` or a base URL") from None
    except (aiohttp.ClientError, OSError) as error:
        away = None if unreachable(error) is None else server_of(url)
        raise RequestError(f"{what}: {type(error).__name__}: {error}", unreachable=away) from error
    exchange.update(backend=response.headers.get(BACKEND_HEADER), status=response.status)
    if len(data) > MAX_REPLY_BYTES:
        raise RequestError(
            f"{what} was answered with status {response.status} and more than {MAX_REPLY_BYTES} bytes after "
            "decompression",
            status=response.status,
        )
    answer = _decoded(data)
    status = _status_in(answer) if response.status == 200 else response.status
    if status == 200 and answer is not None:
        exchange.update(status=status, response=answer)
    else:
        text = data.decode(errors="replace")
        hidden = exchange.without_secrets(text)
        exchange.update(status=status, response=_decoded(hidden.encode()) or hidden)
    if status != 200:
        code = error_code(answer)
        moved = shown_url(response.headers.get("location"))
        hint = f". Redirects are not followed: name the address it redirects to, {moved}" if moved else ""
        raise RequestError(
            f"{what} was answered with status {status}: {_shown(data)}{hint}",
            status=status,
            retry_after=asked_pause(response.headers, status, text),
            unreachable=server_of(url) if code == RouterCode.NO_SERVER_UP else None,
            final=code == RouterCode.REQUEST_BREAKS_SERVERS or is_incurable(status, text),
        )
    call = call_here()
    judge = JudgeAddress(server_of(url), body.get("model") or "")
    if answer is None and data.strip() != b"null":
        problem = RequestError(f"{what}: the answer is not JSON: {_shown(data)}", status=200)
        # A server that has answered does not turn into web pages: this is a gateway's, while the server is away.
        if call is not None and response.content_type == "text/html":
            problem.is_down = judge in call.limits.outages.answered_at
        raise problem
    # Only a usable answer counts: a gateway also answers while its server is away.
    if call is not None:
        call.limits.outages.answered(judge)
    return answer


def _decoded(data: bytes) -> Any:
    """Return the value of a JSON text; ``None`` if it is not JSON."""
    try:
        return decode(data)
    except ValueError:
        return None


def _status_in(answer: Any) -> int:
    """Return the status of an error in the body of an answer with status 200, or in its choice; 200 if there is none.

    Gateways, such as OpenRouter, send the status of a model's error there.
    """
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    parts = (answer, *(choices if isinstance(choices, list) else ()))
    errors = [part.get("error") for part in parts if isinstance(part, Mapping)]
    names = ("code", "status", "status_code")
    codes = [str(error.get(name)) for error in errors if isinstance(error, Mapping) for name in names]
    return next((int(code) for code in codes if re.fullmatch("[45][0-9]{2}", code)), 200)


async def _in_a_place(send: Callable[[], Awaitable[Answer]]) -> Answer:
    """Send a request, and again after growing pauses while the server is full; return the answer with its body.

    The pauses do not count towards the deadline of the function, nor does the timeout of a request include them. The
    permit of the limit is kept: another request would be refused, too.
    """
    backoff = Backoff()
    for _ in range(_MOST_REFUSALS - 1):
        response, data = await send()
        if not _is_full(response, data):
            return response, data
        report_answer(False)
        with outside_the_deadline("a free place at the server"):
            await asyncio.sleep(backoff.next_s())
    return await send()


def _is_full(response: aiohttp.ClientResponse, data: bytes) -> bool:
    if response.status not in _FULL_STATUS:
        return False
    status, text = response.status, data.decode(errors="replace")
    # The router has a place, but no server: an outage, in which one call asks for all.
    has_cause = RouterCode.NO_SERVER_UP in text or is_out_of_credit(status, text) or is_incurable(status, text)
    return not has_cause and asked_pause(response.headers, status, text) is None


async def _send_and_read(send: Callable[[], Awaitable[aiohttp.ClientResponse]]) -> Answer:
    """Send a request, and read the body of the answer."""
    async with await send() as response:
        return response, await _read(response)


def _max_connections() -> int:
    """Return the maximum number of concurrent connections of an event loop; 0 for no limit.

    This is half of the file descriptors that this process may open (``ulimit -n``). The other half is for other event
    loops and the rest of the program.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if limit == resource.RLIM_INFINITY else limit // 2


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Return the decompressed body of a reply. Of one longer than `MAX_REPLY_BYTES`, only the beginning is read."""
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > MAX_REPLY_BYTES:
            response.close()
            break
    return bytes(data)


async def shared_session() -> aiohttp.ClientSession:
    """Return the HTTP session of the running event loop.

    The session closes when the loop shuts down its asynchronous generators, as `asyncio.run` does.
    """
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        for ended in [other for other in _sessions if other.is_closed()]:
            del _sessions[ended]
        # The session is held by an asynchronous generator, which the loop closes when it shuts down. The keeper is
        # held, too: the event loop has only a weak reference to it.
        keeper = _keep(loop)
        _sessions[loop] = keeper, await anext(keeper)
    return _sessions[loop][1]


async def _keep(loop: asyncio.AbstractEventLoop) -> AsyncGenerator[aiohttp.ClientSession, None]:
    # aiohttp's default of 100 connections would make most of thousands of samples wait.
    connector = aiohttp.TCPConnector(limit=_max_connections(), keepalive_timeout=_KEEPALIVE_S, socket_factory=_socket)
    async with aiohttp.ClientSession(connector=connector) as session:
        try:
            yield session
        finally:
            _sessions.pop(loop, None)


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket whose connection the kernel gives up after `_SYN_RETRIES`.

    A timer of the event loop would also expire for connections that are established, if thousands of requests that
    begin at once keep the loop busy for longer.
    """
    family, kind, protocol, _, _ = address
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, _SYN_RETRIES)
    return connection


def _shown(data: bytes) -> str:
    return shorten(data[:2000].decode("utf-8", "replace"), 500)


class Exchange:
    """One request to a model server, with its reply.

    It is added to the record of the sample as soon as it begins, so that a request that never ends is recorded, too.
    Fields are sent at the beginning and by `end` only, because each message from a worker process takes time.
    Outside of a recorded sample, an exchange has no effect.

    Args:
        url, body: the request.
        api_key_env: the name of the environment variable with the API key.
    """

    def __init__(self, url: str, body: Mapping[str, Any], api_key_env: str | None = None) -> None:
        # Not a counter: the attempts of a sample may run in different processes.
        self._head = {"id": secrets.token_hex(4), "attempt": _attempt()}
        self._sample = current()
        self._fields: dict[str, Any] = {}
        self._secrets = _secrets(url, api_key_env)
        # Before anything is recorded: an error answer may repeat the key.
        for secret in self._secrets:
            hide(secret)
        self.model = body.get("model")
        self.is_complete = True
        """Whether the server has ended the answer: another request would get the same one."""
        self.end(
            time=time.time(),
            url=shown_url(url),
            model=self.model,
            messages=body.get("messages"),
            request={name: value for name, value in body.items() if name != "messages"},
            api_key_env=api_key_env,
        )

    def without_secrets(self, text: str) -> str:
        """Return a text, such as an error of a service that repeats the key, without the secrets of the request.

        Short ones, such as ``in`` of ``key=in``, are hidden where they stand alone, and not in other words.
        """
        alone = "(?<![A-Za-z0-9])%s(?![A-Za-z0-9])"
        found = [("%s" if len(one) >= MIN_LENGTH else alone) % re.escape(one) for one in self._secrets]
        return re.sub("|".join(found), "[API key]", text) if found else text

    def update(self, **fields: Any) -> None:
        """Add fields; call `end` afterwards."""
        self._fields |= fields

    def end(self, **fields: Any) -> None:
        """Add fields, and store all that were added so far. Later fields can be added in the same way."""
        if self._sample is not None and self._sample.is_recorded:
            self._sample.exchange({**self._head, **self._fields, **fields})
        self._fields.clear()

    def failed(self, address: str | None, problem: str, answer: Any) -> RequestError:
        """Add the error of an answer with status 200 that has no usable content, and return it as an exception."""
        model = f" (model {self.model})" if self.model else ""
        problem = self.without_secrets(f"{shown_url(address)}{model} sent an answer {problem}: {shorten(answer, 500)}")
        self.end(error=problem)
        return RequestError(problem, status=200)


async def repeated(send: Callable[[], Awaitable[T]], address: str | None, attempts: int | None = None) -> T:
    """Send a request, again after each transient error while there are attempts left.

    The pauses do not count towards the deadline of the function. An outage ends the attempts at once: the function
    waits for its end, and is then called again.

    Args:
        send: sends the request once. It releases its own permits before it raises.
        address: where it sends the request to.
        attempts: the largest number of attempts. By default ``retry.max_attempts`` of the function's options, and 1
            outside of a function; answers of a busy service (429, 529, ``Retry-After``) are then left to the retries of
            the function.

    Raises:
        RequestError: the request failed. It is ``final`` if there are no attempts left; repeated answers of a service
            that is down make it ``unreachable``.
    """
    call = call_here()
    retries = _NO_CALL if call is None else call.limits.options.retry
    most = attempts or retries.max_attempts
    backoff = Backoff(retries.initial_wait)
    attempt = 0
    while True:
        attempt += 1
        try:
            return await send()
        except RequestError as error:
            is_busy = is_refusal(error) or error.retry_after is not None
            if not error.transient or error.unreachable is not None or (is_busy and attempts is None):
                raise
            pause = (error.retry_after or 0.0) + backoff.next_s()
            if attempt >= most or pause > _LONGEST_PAUSE_S:
                if not is_busy and call is not None:
                    if error.is_down and call.limits.options.outage_timeout_s:
                        error.unreachable = server_of(url_of(address, ""))
                    else:
                        error.final = True
                raise
        with outside_the_deadline("the pause before the next attempt of a request"):
            await asyncio.sleep(pause)
