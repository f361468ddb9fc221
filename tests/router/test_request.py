from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from reward_loop.router.http_client import Answer
from reward_loop.router.request import WATCH_AFTER_S, ClientLeftError, Exchange
from reward_loop.router.router_error import Refusal


class Client:
    """The other side of an exchange: what it sends, and what it gets."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for message in messages:
            self.messages.put_nowait(message)
        self.got: list[dict[str, Any]] = []

    def exchange(self, timeout_s: float = 30, version: str = "1.1", arrived: float | None = None) -> Exchange:
        async def send(message: Any) -> None:
            self.got.append(message)

        scope = {"method": "POST", "path": "/x", "http_version": version}
        late: Callable[[Exchange], Refusal] = lambda exchange: Refusal(504, "late")  # noqa: E731
        return Exchange(scope, self.messages.get, send, timeout_s, late, arrived)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.got)


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


LEFT = {"type": "http.disconnect"}


async def test_bodies_are_read_whole() -> None:
    assert await Client(part(b"ab")).exchange().read_body(2) == b"ab"
    exchange = Client(part(b"a", True), part(b"", True), part(b"b")).exchange()
    assert await exchange.read_body(2) == b"ab"
    exchange.end()


@pytest.mark.parametrize("parts", [[part(b"abc")], [part(b"ab", True), part(b"c", True)]])
async def test_bodies_that_are_too_long_are_refused_before_their_end(parts: list[dict[str, Any]]) -> None:
    exchange = Client(*parts).exchange()
    with pytest.raises(Refusal) as refused:
        await exchange.read_body(2)
    assert refused.value.status == 413
    exchange.end()


async def test_a_client_may_leave_within_its_body() -> None:
    exchange = Client(part(b"a", True), LEFT).exchange()
    with pytest.raises(ClientLeftError):
        await exchange.read_body(2)
    exchange.end()


def answer(*parts: bytes, status: int = 200, complete: bool = True) -> Answer:
    made = Answer(None)  # type: ignore[arg-type]
    made.status = status
    made.headers = [(b"x-own", b"1")]
    for piece in parts:
        made._parts.append(piece)
    made.complete = complete
    return made


async def test_answers_keep_their_headers() -> None:
    client = Client()
    await client.exchange().pass_on(answer(b"ok"))
    assert client.got[0] == {"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]}
    assert client.body == b"ok"


async def test_a_client_of_http_1_0_gets_the_whole_at_once() -> None:
    client = Client()
    given = answer(b"a", complete=False)
    passing = asyncio.create_task(client.exchange(version="1.0").pass_on(given))
    await asyncio.sleep(0)
    given._parts.append(b"b")
    given.complete = True
    given.wake()
    await passing
    assert (b"content-length", b"2") in client.got[0]["headers"]
    assert [message["body"] for message in client.got[1:]] == [b"ab"]


async def test_what_has_begun_is_not_refused_any_more() -> None:
    client = Client()
    exchange = client.exchange()
    await exchange.refuse(Refusal(503, "first"))
    await exchange.refuse(Refusal(503, "second"))
    assert b"first" in client.body
    assert b"second" not in client.body


@pytest.mark.parametrize(("why", "reason"), [("late", Refusal), ("left", ClientLeftError)])
async def test_its_task_is_cancelled_when_time_is_over_and_when_the_client_has_left(why: str, reason: type) -> None:
    client = Client(part(b""), LEFT)
    now = asyncio.get_running_loop().time()
    exchanges = []

    async def serve() -> None:
        exchanges.append(client.exchange(1 if why == "late" else 30, arrived=now))
        await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    exchanges[0].check(now + WATCH_AFTER_S - 0.01)
    await asyncio.sleep(0)
    assert not task.cancelling()
    exchanges[0].check(now + (1 if why == "late" else WATCH_AFTER_S))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert isinstance(exchanges[0].broken_off, reason)
    exchanges[0].end()
