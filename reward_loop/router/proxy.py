"""The router's data plane: passes requests to servers and their answers back, bytes untouched."""

from __future__ import annotations

import asyncio
import logging
import random

import orjson

from reward_loop._retry_after import retry_after_seconds
from reward_loop.router.config import RouterConfig
from reward_loop.router.exchange import WATCH_AFTER_S, ClientLeftError, Exchange, Receive, Scope, Send
from reward_loop.router.headers import RawHeader, end_to_end, find, to_wire
from reward_loop.router.limits import Gate, RetryBudget
from reward_loop.router.pool import AllRestError, NoWorkerError, Worker, WorkerPool, WorkerState
from reward_loop.router.refusal import Refusal
from reward_loop.router.routing import Route, merged_models, route
from reward_loop.router.upstream import Answer, BrokenError, ConnectError

__all__ = ["Proxy"]

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0

_PAUSE_S = 1.0
"""For a 429 that does not say how long to wait."""
_LONGEST_PAUSE_S = 60.0

_WORTH_A_RETRY = frozenset({429, 500, 502, 503, 504})


class Proxy:
    """An ASGI app that forwards every request to a server of the pool.

    What fails before an answer has begun is repeated on another server, or on the same one once it is back. If there is
    none, whatever the server answered is passed on, errors included.

    The proxy's own answers have vLLM's error shape: 400 and 404 for what no server can answer, 413 and 431 for what is
    too long, 429 when all servers have asked for a pause, 502 when the request has broken several servers, 503 when no
    server was to be had or too many requests wait, 504 when a server did not answer in time.
    """

    def __init__(self, pool: WorkerPool, config: RouterConfig | None = None) -> None:
        config = config or RouterConfig()
        self.gate = Gate(config.max_in_flight, config.max_queue)
        self.budget = RetryBudget(config.retry_share)
        self._pool = pool
        self._config = config
        # The length is known anew, and there is nothing more to expect, once the body is complete.
        not_passed_on = {b"host", b"content-length", b"expect"}
        if config.api_key or config.worker_api_key:
            not_passed_on.add(b"authorization")
        self._not_passed_on = frozenset(not_passed_on)
        self._forwarded: set[Exchange] = set()
        self._sweeping: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            raise NotImplementedError(f"the router forwards HTTP requests only, not {scope['type']}")
        exchange = Exchange(scope, receive, send, self._config.request_timeout_s, self._late)
        try:
            if not self.gate.has_room:
                exchange.set_timer()
            await self.gate.enter()
            try:
                await self._serve(exchange)
            finally:
                self.gate.leave()
                self._forwarded.discard(exchange)
        except Refusal as refusal:
            await self._refuse(exchange, refusal)
        except ClientLeftError:
            pass
        except asyncio.CancelledError:
            reason = exchange.broken_off
            task = asyncio.current_task()
            if reason is None or task is None or task.uncancel() > 0:
                raise
            if isinstance(reason, Refusal):
                await self._refuse(exchange, reason)
        finally:
            exchange.end()

    async def _serve(self, exchange: Exchange) -> None:
        scope = exchange.scope
        headers: list[RawHeader] = scope["headers"]
        passed_on = self._headers_for_servers(headers)
        body = await exchange.read_body(self._config.max_body_bytes)
        if body or scope["method"] in ("POST", "PUT", "PATCH"):
            passed_on += b"content-length: %d\r\n" % len(body)
        pool = self._pool
        path = scope["path"]
        if pool.several_models and path == "/v1/models" and scope["method"] == "GET":
            content = orjson.dumps(merged_models(pool))
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
            return await exchange.answer(200, headers, content)
        destination = route(pool, path, body)
        key = pool.policy.key(headers, body) if pool.policy.by_content else 0
        self.budget.earn()
        self._watch(exchange)
        await self._forward(exchange, destination, key, passed_on, body)
        return None

    def _watch(self, exchange: Exchange) -> None:
        """From now on its deadline holds, and a while later its client's leaving is noticed."""
        if self._config.request_timeout_s < 4 * WATCH_AFTER_S:
            exchange.set_timer()
        # One timer for all: one for each would be a good part of what a quick request costs.
        self._forwarded.add(exchange)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._sweep)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for exchange in self._forwarded:
            exchange.check(now)
        self._sweeping = loop.call_later(WATCH_AFTER_S, self._sweep) if self._forwarded else None

    def _headers_for_servers(self, headers: list[RawHeader]) -> bytes:
        passed_on = to_wire(end_to_end(headers), without=self._not_passed_on)
        if len(passed_on) > self._config.max_header_bytes:
            raise Refusal(431, f"the headers are longer than {self._config.max_header_bytes} bytes", close=True)
        length = find(headers, b"content-length")
        if length and int(length) > self._config.max_body_bytes:
            raise Refusal(413, f"the body is longer than {self._config.max_body_bytes} bytes", close=True)
        if (find(headers, b"upgrade") or b"").lower() == b"websocket":
            raise Refusal(501, "the router does not forward WebSockets", close=True)
        return passed_on

    async def _forward(self, exchange: Exchange, destination: Route, key: int, headers: bytes, body: bytes) -> None:
        scope = exchange.scope
        target: bytes = scope.get("raw_path") or scope["path"].encode()
        if scope["query_string"]:
            target = b"%b?%b" % (target, scope["query_string"])
        method = scope["method"].encode()
        pool = self._pool
        loop = asyncio.get_running_loop()
        failed: list[Worker] = []
        attempts = 0
        while True:
            exchange.waits_for = None
            worker = pool.pick(pool.group(*destination), key, failed) or await self._wait(destination, key, failed)
            exchange.waits_for = worker.url
            worker.requests += 1
            worker.in_flight += 1
            began = loop.time()
            status = 0
            try:
                answer = await worker.upstream.request(method, target, headers, body)
                status = answer.status
                if status in _WORTH_A_RETRY:
                    attempts += 1
                    if self._may_retry(worker, answer, destination, [*failed, worker], attempts):
                        answer.close()
                    else:
                        return await exchange.pass_on(answer)
                else:
                    if worker.failures or worker.state is not WorkerState.UP:
                        pool.succeeded(worker)
                    return await exchange.pass_on(answer)
            except (ConnectError, BrokenError) as error:
                worker.stats.broken += 1
                pool.eject(worker, f"{type(error).__name__}: {error}")
                if exchange.started:
                    logger.warning("%s: the answer of %s broke off: %s", exchange.name, worker.url, error)
                    return None
                attempts += isinstance(error, BrokenError)
                if attempts >= self._config.max_attempts:
                    raise Refusal(502, f"the connection broke {attempts} times: {pool.describe()}") from error
            finally:
                worker.in_flight -= 1
                if not worker.in_flight and worker.state is WorkerState.ASLEEP:
                    worker.idle.set()
                if status:
                    worker.stats.count(status, loop.time() - began)
            worker.stats.retries += 1
            failed.append(worker)
            await self._back_off(exchange, len(failed))

    async def _wait(self, destination: Route, key: int, failed: list[Worker]) -> Worker:
        try:
            return await self._pool.acquire(*destination, key, failed)
        except NoWorkerError as error:
            raise Refusal(503, str(error)) from error
        except AllRestError as error:
            raise Refusal(429, str(error), retry_after_s=error.seconds) from error

    def _may_retry(
        self, worker: Worker, answer: Answer, destination: Route, failed: list[Worker], attempts: int
    ) -> bool:
        """Takes note of a failure that a server has answered with; whether to try another one."""
        pause = find(answer.headers, b"retry-after")
        if answer.status == 429 or (answer.status == 503 and pause):
            self._pool.rest(worker, _pause(pause))
        else:
            self._pool.failed(worker, f"status {answer.status}")
        if attempts >= self._config.max_attempts:
            return False
        other = self._pool.pick(self._pool.group(*destination), 0, failed)
        return other is not None and self.budget.spend()

    async def _back_off(self, exchange: Exchange, failures: int) -> None:
        # The first time another server is tried at once.
        if failures > 1:
            longest = min(_FIRST_BACKOFF_S * 2.0 ** (failures - 2), _LONGEST_BACKOFF_S)
            await asyncio.sleep(min(longest * random.uniform(0.5, 1), max(0, exchange.time_left)))

    async def _refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        logger.warning("%s: %d, %s", exchange.name, refusal.status, refusal.message)
        await exchange.refuse(refusal)

    def _late(self, exchange: Exchange) -> Refusal:
        timeout = f"{self._config.request_timeout_s:g} s"
        if exchange.waits_for:
            return Refusal(504, f"{exchange.waits_for} did not answer within the {timeout} that a request may take")
        return Refusal(503, f"no reward model server was available for {timeout}: {self._pool.describe()}", close=True)


def _pause(retry_after: bytes | None) -> float:
    """How long a server rests that has too much to do."""
    seconds = None if retry_after is None else retry_after_seconds(retry_after.decode("latin-1"))
    return _PAUSE_S if seconds is None else min(seconds, _LONGEST_PAUSE_S)
