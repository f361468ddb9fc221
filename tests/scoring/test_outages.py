"""Judges that cannot be reached, through real clients and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable
from itertools import product
from typing import Any

import aiohttp
import httpx
import openai
import pytest
import requests

from reward_loop import Outcome, RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop._util import retry_after
from reward_loop._util.transient import RouterCode
from reward_loop._util.web_server import listen
from reward_loop.client import chat_complete, classify
from reward_loop.limits import outages
from reward_loop.limits.outages import JudgeAddress
from tests.support.clock import advance, until

pytestmark = pytest.mark.processes

ANSWER = b'{"choices": [{"message": {"content": "7"}}], "data": [{"probs": [7]}]}'

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


def answer_of(status: int, body: bytes = ANSWER, headers: str = "") -> bytes:
    kind = b"text/html" if body == b"<html>" else b"application/json"
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\ncontent-type: %s\r\nconnection: close\r\n%s\r\n%s" % (
        *(status, len(body), kind, headers.encode(), body),
    )


def answers(status: int, body: bytes = ANSWER, headers: str = "") -> Peer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer_of(status, body, headers))

    return answer


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return await reader.readexactly(int(lengths[0].partition(b":")[2]) if lengths else 0)


def error(code: str) -> bytes:
    return b'{"error": {"message": "no", "code": "%s"}}' % code.encode()


async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)


async def cuts_within_the_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.write(answer_of(200)[:-5])


async def cuts_the_handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(20)


class Judge:
    """A server on one port that is first away in some way, and then answers."""

    def __init__(self) -> None:
        listener = listen("127.0.0.1")
        self.port = listener.getsockname()[1]
        listener.close()
        self.address = f"127.0.0.1:{self.port}"
        self.connections = 0
        self._listener: socket.socket | None = None
        self._accepted: set[asyncio.Task[None]] = set()

    async def be(self, peer: Peer | None) -> None:
        """Treat connections in this way from now on; ``None``: refuse them."""
        await self.stop()
        if peer is not None:
            self._listener = socket.create_server(("127.0.0.1", self.port), backlog=100)
            self._listener.setblocking(False)
            asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener, peer)

    # Not `asyncio.start_server`: closed while it accepts a connection, it leaves this one open, without an answer.
    def _accept(self, listener: socket.socket, peer: Peer) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            self._accepted.add(asyncio.create_task(self._serve(listener.accept()[0], peer)))
            self.connections += 1

    async def _serve(self, connection: socket.socket, peer: Peer) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        with contextlib.suppress(OSError, EOFError):
            await peer(reader, writer)
            await writer.drain()
        writer.close()

    async def stop(self) -> None:
        """Refuse connections, and wait until the accepted ones are closed."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            await asyncio.gather(*self._accepted)
            self._accepted.clear()


@pytest.fixture
async def judge() -> AsyncIterator[Judge]:
    judge = Judge()
    yield judge
    await judge.stop()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_S", "LONGEST_S"):
        monkeypatch.setattr(retry_after, name, 0.02)


async def by_our_client(solution_str: str, reward_router_address: str) -> float:
    return float((await chat_complete(reward_router_address, solution_str, timeout=60)).text)


async def by_classify(solution_str: str, reward_router_address: str) -> Any:
    return await classify(reward_router_address, solution_str)


def in_a_thread(solution_str: str, reward_router_address: str) -> float:
    return asyncio.run(by_our_client(solution_str, reward_router_address))


async def by_aiohttp(solution_str: str, reward_router_address: str) -> float:
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(f"http://{reward_router_address}/v1/chat/completions", json={"messages": []}) as response,
    ):
        return float((await response.json())["choices"][0]["message"]["content"])


async def by_httpx(solution_str: str, reward_router_address: str) -> float:
    async with httpx.AsyncClient(trust_env=False) as client:
        response = await client.post(f"http://{reward_router_address}/v1/chat/completions", json={})
    return float(response.raise_for_status().json()["choices"][0]["message"]["content"])


def by_requests(solution_str: str, reward_router_address: str) -> float:
    response = requests.post(f"http://{reward_router_address}/v1/chat/completions", json={}, timeout=60)
    response.raise_for_status()
    return float(response.json()["choices"][0]["message"]["content"])


async def by_openai(solution_str: str, reward_router_address: str) -> float:
    client = openai.AsyncOpenAI(
        api_key="x",
        base_url=f"http://{reward_router_address}/v1",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )
    async with client:
        reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    return float(reply.choices[0].message.content or "")


CLIENTS = (
    by_our_client, by_classify, in_a_thread, by_aiohttp, by_httpx, by_requests, by_openai
)  # fmt: skip

KINDS: dict[str, Peer | None] = {
    "refused": None,
    "reset": resets,
    "closed": closes,
    "cut within the answer": cuts_within_the_answer,
    "502": answers(502),
    "503": answers(503),
    "504": answers(504),
}


def scoring(function: Any, timeout: float = 300.0, **options: Any) -> ScoringFunction:
    options = {"retry": {"initial_wait": 0.001}, **options}
    return ScoringFunction(function, options=RewardLoopConfig(timeout=timeout, **options))


async def waiting(count: int, function: ScoringFunction) -> None:
    """Wait until this number of calls wait for the end of an outage, or have their turn."""
    await until(lambda: sum(outage.calls for outage in function.limits.outages.open.values()) == count)


async def scored(function: ScoringFunction, judge: Judge, count: int = 1) -> list[Any]:
    from reward_loop import NaiveRewardLoopManager

    manager = NaiveRewardLoopManager(
        function.limits.options, compute_score=function, reward_router_address=judge.address
    )
    return await asyncio.gather(*(manager.score(RewardSample("4", uid=f"u{i}")) for i in range(count)))


GATEWAYS: dict[str, Peer | None] = {
    str(status): answers(status, b"<html>", "server: cloudflare\r\n") for status in (*range(520, 526), 530)
}
"""The statuses of a gateway whose server is away."""


@pytest.mark.parametrize(("client", "kind"), [*product(CLIENTS, KINDS), *product([by_our_client], GATEWAYS)])
async def test_samples_wait_for_a_judge_that_is_away(client: Any, kind: str, judge: Judge) -> None:
    await judge.be((KINDS | GATEWAYS)[kind])
    function = scoring(client)
    samples = asyncio.create_task(scored(function, judge, 3))
    await waiting(3, function)
    await judge.be(answers(200))
    results = await samples
    assert [(result.outcome, result.score) for result in results] == [(Outcome.SCORED, 7.0)] * 3
    for result in results:
        assert 0 < result.outage_s <= result.wait_s
        assert result.attempts > 1


async def test_the_wait_is_not_part_of_the_deadline_and_holds_no_permit(judge: Judge) -> None:
    function = scoring(in_a_thread, 2.0, max_threads=1, limits={"default": {"max_concurrent": 1}})
    samples = asyncio.create_task(scored(function, judge, 2))
    await waiting(2, function)
    began = asyncio.get_running_loop().time()
    await advance(2.5)  # longer than the deadline
    in_flight = function.limits.limiters["default"].in_flight
    await judge.be(answers(200))
    results = await samples
    await asyncio.to_thread(function.close)
    assert in_flight <= 1  # the probe
    assert [result.score for result in results] == [7.0, 7.0]
    assert min(result.outage_s for result in results) > 1  # the calls of the probes do not count
    assert asyncio.get_running_loop().time() - began < 20


async def test_the_page_of_a_gateway_is_not_an_answer_of_the_judge(judge: Judge) -> None:
    gateway = answers(200, b"<html>")
    function = scoring(by_our_client)
    await judge.be(gateway)
    (result,) = await scored(function, judge)
    assert result.outcome is Outcome.FAILED  # the address may be wrong
    assert "not JSON: '<html>'" in result.error
    await judge.be(answers(200))
    assert (await scored(function, judge))[0].score == 7
    await judge.be(gateway)
    samples = asyncio.create_task(scored(function, judge, 2))
    await waiting(2, function)
    await judge.be(answers(200))
    assert [result.score for result in await samples] == [7.0, 7.0]


async def test_after_the_bound_samples_fail_with_the_address_the_duration_and_the_option(judge: Judge) -> None:
    function = scoring(by_our_client, outage_timeout_s=0.3)
    results = await scored(function, judge, 2)
    for result in results:
        assert result.outcome is Outcome.FAILED
        away = rf"judge http://{judge.address} could not be reached for \d+ s; calls wait at most 0\.3 s"
        assert re.search(away, result.error), result.error
        assert "reward_loop.outage_timeout_s" in result.error
        assert "has never answered this process: check the address" in result.error
    # The next sample asks once, and does not wait for another 0.3 s.
    (late,) = await scored(function, judge)
    assert (late.outcome, late.attempts) == (Outcome.FAILED, 1)
    await judge.be(answers(200))
    (result,) = await scored(function, judge)
    assert result.score == 7
    await judge.be(None)
    again = asyncio.create_task(scored(function, judge))
    await waiting(1, function)  # this is another outage
    await judge.be(answers(200))
    assert (await again)[0].score == 7


async def test_a_judge_that_answered_the_functions_own_client_is_not_said_to_have_never_answered(judge: Judge) -> None:
    await judge.be(answers(200))
    function = scoring(by_httpx, outage_timeout_s=0.3)
    assert (await scored(function, judge))[0].score == 7
    await judge.be(None)
    (result,) = await scored(function, judge)
    assert "could not be reached for" in result.error
    assert "never answered" not in result.error


async def test_without_a_bound_an_unreachable_judge_is_a_transient_error(judge: Judge) -> None:
    (result,) = await scored(scoring(by_our_client, outage_timeout_s=0), judge)
    assert (result.outcome, result.attempts, result.outage_s) == (Outcome.FAILED, 3, 0.0)


@pytest.mark.parametrize("refusal", [b"", answer_of(504), answer_of(502, b"<html>")], ids=["reset", "504", "502"])
async def test_a_sample_that_the_judge_cannot_answer_fails_while_others_are_answered(
    refusal: bytes, judge: Judge
) -> None:
    """Its request takes longer than a gateway waits, or resets the connection, as one that crashes its server."""

    async def picky(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await read_request(reader)
        writer.write(refusal if b"poison" in body else answer_of(200))

    await judge.be(picky)
    function = scoring(by_our_client)
    poison = asyncio.create_task(function(RewardSample("poison"), reward_router_address=judge.address))
    while not poison.done():
        assert (await function(RewardSample("4"), reward_router_address=judge.address)).score == 7
        await asyncio.sleep(0.01)
    result = poison.result()
    assert result.outcome is Outcome.FAILED
    assert 3 <= result.attempts < 20


async def test_the_console_has_one_line_for_all_samples_and_one_when_the_judge_is_back(
    judge: Judge, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outages, "_QUIET_S", 0.2)
    await judge.be(answers(200))
    function = scoring(by_our_client)
    await scored(function, judge)
    await judge.be(None)
    caplog.set_level(logging.WARNING)
    samples = asyncio.create_task(scored(function, judge, 8))
    await until(lambda: "unreachable" in caplog.text)
    await judge.be(answers(200))
    await samples
    lines = [record.getMessage() for record in caplog.records if record.name == outages.__name__]
    assert [re.sub(r"\d+ s,", "N s,", line, count=1) for line in lines] == [
        f"judge http://{judge.address} unreachable for N s, 8 calls waiting, for at most 600 s "
        "(reward_loop.outage_timeout_s).",
        f"judge http://{judge.address} answers again after N s, continuing 8 calls",
    ]


async def test_a_judge_that_never_answered_is_named_at_once(judge: Judge, caplog: pytest.LogCaptureFixture) -> None:
    function = scoring(by_our_client)
    samples = asyncio.create_task(scored(function, judge))
    await until(lambda: "check the address" in caplog.text)
    await judge.be(answers(200))
    await samples


@pytest.mark.parametrize("name", ["no-such-host.invalid:1", "https"])
async def test_dns_failures_and_cut_handshakes_are_outages(name: str, judge: Judge) -> None:
    await judge.be(cuts_the_handshake)
    judge.address = f"https://{judge.address}/v1" if name == "https" else name
    (result,) = await scored(scoring(by_our_client, outage_timeout_s=0.2), judge)
    assert "could not be reached for" in result.error, result.error
    assert result.attempts > 1


async def test_a_connection_that_is_not_established_in_time_is_an_outage(monkeypatch: Any, judge: Judge) -> None:
    monkeypatch.setattr("reward_loop.client.http._SYN_RETRIES", 1)  # 3 s
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    judge.address = f"127.0.0.1:{full.getsockname()[1]}"
    fillers = [socket.socket() for _ in range(4)]
    for filler in fillers:  # the queue of connections is full: further ones get no answer
        filler.setblocking(False)
        filler.connect_ex(full.getsockname())
    (result,) = await scored(scoring(by_our_client, outage_timeout_s=0.5), judge)
    for opened in (full, *fillers):
        opened.close()
    assert "Cannot connect to host" in result.error
    assert "could not be reached for" in result.error


@pytest.mark.parametrize(("status", "is_outage"), [(403, True), (502, True), (407, False)])
async def test_a_proxy_that_refuses_to_connect_is_an_outage(
    status: int, is_outage: bool, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", f"http://{judge.address}")
    monkeypatch.setenv("no_proxy", "")
    await judge.be(answers(status, b"no"))
    judge.address = "https://judge.example/v1"
    (result,) = await scored(scoring(by_our_client, outage_timeout_s=0.2), judge)
    assert result.outcome is Outcome.FAILED
    assert ("judge https://judge.example could not be reached" in result.error) == is_outage, result.error


async def test_the_router_says_that_no_server_is_up(judge: Judge) -> None:
    await judge.be(answers(503, error(RouterCode.NO_SERVER_UP)))
    function = scoring(by_our_client, retry={"max_attempts": 1})
    samples = asyncio.create_task(scored(function, judge))
    await waiting(1, function)
    # One request: the router is not full, and its answer is not repeated before the outage is known.
    assert judge.connections <= 2
    await judge.be(answers(200))
    assert (await samples)[0].score == 7


@pytest.mark.parametrize("client", [by_our_client, by_httpx, by_requests, by_openai])
@pytest.mark.parametrize("status", [400, 502])
async def test_a_request_that_breaks_servers_is_final(client: Any, status: int, judge: Judge) -> None:
    await judge.be(answers(status, error(RouterCode.REQUEST_BREAKS_SERVERS)))
    (result,) = await scored(scoring(client), judge)
    assert (result.outcome, result.attempts, judge.connections) == (Outcome.FAILED, 1, 1)


async def test_errors_without_an_address_stand_for_the_function_itself() -> None:
    is_away = True

    async def compute_score(solution_str: str) -> float:
        if is_away or solution_str == "never":
            raise ConnectionResetError
        return 1.0

    function = scoring(compute_score)
    samples = [asyncio.create_task(function(RewardSample(text))) for text in ("4", "never", "4")]
    await asyncio.sleep(0.2)
    assert not any(sample.done() for sample in samples)
    is_away = False
    while not samples[1].done():
        assert (await function(RewardSample("4"))).score == 1
        await asyncio.sleep(0.01)
    assert [(await sample).score for sample in samples] == [1.0, None, 1.0]


async def test_a_call_that_gets_no_permit_does_not_end_the_outage_of_its_function() -> None:
    holds, release = asyncio.Event(), asyncio.Event()

    async def compute_score(solution_str: str) -> float:
        if solution_str == "hold":
            holds.set()
            await release.wait()
        raise ConnectionResetError

    function = scoring(compute_score, limits={"default": {"max_concurrent": 1, "max_wait": 0.01}})
    outages = function.limits.outages
    waits = asyncio.create_task(function(RewardSample("4")))
    await waiting(1, function)
    ((name, outage),) = outages.open.items()
    assert name == JudgeAddress("", function=function.name)
    holder = asyncio.create_task(function(RewardSample("hold")))
    await holds.wait()
    result = await function(RewardSample("4"))
    assert "no permit" in str(result.error)
    assert (outages.open, outages.answered_at) == ({name: outage}, {})
    for task in (waits, holder):
        task.cancel()
    await asyncio.gather(waits, holder, return_exceptions=True)
