import asyncio
import contextlib
import socket

import pytest

from reward_loop import (
    BudgetSpentError,
    ConfigError,
    JobServiceError,
    LimitError,
    Outcome,
    TooManyFailuresError,
)
from reward_loop._util.framing import frame, read_frame
from reward_loop._util.web_server import reserve
from reward_loop.config import RewardLoopConfig
from reward_loop.limits import client, server
from reward_loop.limits.client import RemoteLimits, SharedFailureBound, open_limits
from reward_loop.limits.local import LocalLimits
from reward_loop.limits.outages import JudgeAddress
from reward_loop.limits.protocol import encode
from reward_loop.limits.server import LimitServer, serve_limits
from reward_loop.types import RewardResult
from tests.clock import advance, until

FAILED = RewardResult(Outcome.FAILED, None, error="sample u7: judge raised")


def options(**judge):
    return RewardLoopConfig(limits={"judge": judge})


@pytest.fixture(params=["local", "remote"])
def kept(request, serve):
    """Return a function that makes limits, in this process or of a service, and the object that keeps them."""

    async def make(config):
        if request.param == "local":
            limits = LocalLimits(config)
            return limits, limits
        service, address = await serve(config)
        return RemoteLimits(address, config), service.limits

    return make


async def test_no_more_calls_in_flight_than_the_limit(kept):
    job, state = await kept(options(max_concurrent=3))
    in_flight = peak = 0
    three = asyncio.Barrier(3)

    async def call():
        nonlocal in_flight, peak
        permit = await job.acquire("judge")
        in_flight += 1
        peak = max(peak, in_flight)
        await three.wait()
        in_flight -= 1
        permit.leave()

    await asyncio.gather(*(call() for _ in range(99)))
    assert peak == 3
    await until(lambda: state.snapshot()["limits"]["judge"]["in_flight"] == 0)


async def test_messages_that_json_cannot_encode_do_not_block_others(serve):
    service, address = await serve(options(max_concurrent=1))
    job = RemoteLimits(address)
    place = await job.acquire("judge")
    job.count(RewardResult(Outcome.FAILED, None, error="sample u1: judge raised ValueError: \ud83d is no verdict"))
    with pytest.raises(TypeError):
        place.used(object())
    place.leave()
    (await asyncio.wait_for(job.acquire("judge"), 30)).leave()
    assert list(service._failures[""]._failed) == [True]


async def test_a_call_that_is_cancelled_gives_back_its_place(kept):
    job, state = await kept(options(max_concurrent=1))
    place = await job.acquire("judge")
    waiting = asyncio.create_task(job.acquire("judge"))
    await until(lambda: state.snapshot()["limits"]["judge"]["waiting"] == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    place.leave()
    (await job.acquire("judge")).leave()


async def test_waiting_has_an_end(kept):
    job, _ = await kept(options(max_concurrent=1, max_wait=0.1))
    place = await job.acquire("judge")
    with pytest.raises(LimitError, match=r"limit 'judge': no permit within max_wait=0.1 s"):
        await job.acquire("judge")
    place.leave()
    (await job.acquire("judge")).leave()


async def test_impossible_requests_are_errors(kept):
    job, _ = await kept(options(tokens_per_minute=10))
    with pytest.raises(LimitError, match="11 tokens"):
        await job.acquire("judge", 11)
    with pytest.raises(LimitError, match="unknown limit 'jugde'; did you mean 'judge'"):
        await job.acquire("jugde")


async def test_the_budget_is_counted(kept):
    job, state = await kept(RewardLoopConfig(budget={"max_cost": 1.0}))
    job.spend(0.5, 100)
    await until(lambda: state.cost == 0.5)
    assert job.spent is None
    job.spend(0.6, 0)
    await until(lambda: job.spent is not None)
    assert "1.1 of reward_loop.budget.max_cost=1" in job.spent


async def test_no_permit_is_granted_once_the_budget_is_used_up(kept):
    job, state = await kept(RewardLoopConfig(limits={"judge": {"max_concurrent": 1}}, budget={"max_cost": 1.0}))

    async def call():
        (await job.acquire("judge")).leave()

    permit = await job.acquire("judge")
    waiting = [asyncio.create_task(call()) for _ in range(3)]
    await until(lambda: state.snapshot()["limits"]["judge"]["waiting"] == 3)
    job.spend(1.0, 0)
    permit.leave()
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in errors] == [BudgetSpentError] * 3
    with pytest.raises(BudgetSpentError, match=r"used up: 1 of reward_loop.budget.max_cost=1"):
        await job.acquire("judge")
    await until(lambda: state.snapshot()["limits"]["judge"]["in_flight"] == 0)


async def test_failures_of_all_workers_count_together(serve):
    config = RewardLoopConfig(max_failed_share=0.5, min_samples_for_failed_share=4)
    _, address = await serve(config)
    workers = [open_limits(config.model_copy(update={"job": address})) for _ in range(4)]
    for worker in workers:
        SharedFailureBound(worker).count(FAILED)
    await until(lambda: all(worker.stopped for worker in workers))
    with pytest.raises(TooManyFailuresError, match=r"(?s)4 of the last 4 samples failed.*u7"):
        workers[0].count(RewardResult(Outcome.SCORED, 1.0))
    late = RemoteLimits(address)
    await late.status()
    assert late.stopped


async def test_a_client_that_dies_releases_its_permits(serve):
    service, address = await serve(options(max_concurrent=2))
    dying, other = RemoteLimits(address), RemoteLimits(address)
    for _ in range(2):
        await dying.acquire("judge")
    queued = asyncio.create_task(dying.acquire("judge"))
    waiting = asyncio.create_task(other.acquire("judge"))
    await until(lambda: service.limits.snapshot()["limits"]["judge"]["waiting"] == 2)
    dying.close()
    await waiting
    with pytest.raises(JobServiceError):
        await queued
    status = service.limits.snapshot()["limits"]["judge"]
    assert (status["in_flight"], status["waiting"]) == (1, 0)
    other.close()
    await until(lambda: service.limits.snapshot()["limits"]["judge"]["in_flight"] == 0)


async def test_a_service_that_goes_is_an_error_and_not_a_hang():
    service = LimitServer(options(max_concurrent=1))
    job = RemoteLimits(await service.start(), RewardLoopConfig(outage_timeout_s=0))
    await job.acquire("judge")
    waiting = asyncio.create_task(job.acquire("judge"))
    await until(lambda: service.limits.snapshot()["limits"]["judge"]["waiting"] == 1)
    await service.stop()
    with pytest.raises(JobServiceError, match=r"unreachable.*keeps the limits of all workers.*no calls are made"):
        await waiting
    with pytest.raises(JobServiceError):
        await job.acquire("judge")
    with pytest.raises(JobServiceError):
        job.count(RewardResult(Outcome.SCORED, 1.0))
    job.close()


@pytest.mark.parametrize("frozen", [False, True])
async def test_a_frozen_service_is_found_and_a_full_limit_is_not_taken_for_one(frozen, serve, monkeypatch):
    monkeypatch.setattr(client, "TIMEOUT_S", 0.2)
    _, address = await serve(options(max_concurrent=1))
    limits = RemoteLimits(address)
    held = await limits.acquire("judge")
    waiting = asyncio.create_task(limits.acquire("judge"))
    if frozen:  # as by SIGSTOP: its connections stay open
        never = asyncio.Event()
        monkeypatch.setattr(server, "receive", lambda reader: never.wait())
        await limits.status()  # the last message that it receives
        with pytest.raises(JobServiceError, match=r"no answer within 0.2 s"):
            await waiting
        never.set()
    else:
        await asyncio.sleep(0.6)
        held.leave()
        (await waiting).leave()
    limits.close()


async def test_a_service_that_goes_as_it_greets_is_an_error_too(monkeypatch):
    connection = socket.socket()

    class Writer:
        """A connection that has closed already."""

        def get_extra_info(self, name):
            return connection

        def write(self, data):
            pass

        def is_closing(self):
            return True

        def close(self):
            connection.close()

    async def connect(host, port):
        reader = asyncio.StreamReader()
        reader.feed_data(frame(b"nonce") + encode(("limits", {"judge": None})))
        reader.feed_eof()
        return reader, Writer()

    monkeypatch.setattr(asyncio, "open_connection", connect)
    job = RemoteLimits("127.0.0.1:1:token")
    async with asyncio.timeout(60):
        with pytest.raises(JobServiceError, match="the connection has ended"):
            await job.acquire("judge")


async def test_a_node_that_is_gone_is_noticed_from_both_sides(serve):
    service, address = await serve(options(max_concurrent=1))
    job = RemoteLimits(address)
    (await job.acquire("judge")).leave()
    ((client, _),) = service._connections.items()
    for messages in (job._messages, client):
        connection = messages.writer.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


async def test_nobody_gets_in_without_the_token(serve):
    _, address = await serve(options(max_concurrent=1))
    with pytest.raises(JobServiceError, match="does not accept the token"):
        await RemoteLimits(address[:-1] + "?").acquire("judge")
    host, port, _ = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await read_frame(reader)
    writer.write(frame(bytes(32)))
    assert await reader.read() == frame()
    writer.close()


def test_a_job_address_that_is_none():
    with pytest.raises(ConfigError, match="host:port:token"):
        RemoteLimits("here")


def test_the_service_in_a_thread():
    async def use(address):
        job = RemoteLimits(address)
        (await job.acquire("judge")).leave()
        status = await job.status()
        job.close()
        return status

    with serve_limits(options(max_concurrent=1)) as address:
        assert asyncio.run(use(address))["limits"]["judge"]["max_in_flight"] == 1
    with pytest.raises(JobServiceError):
        asyncio.run(use(address))


async def answered(job):
    """Wait for an answer of a service that has just started: the connection before may be failing now."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(JobServiceError):
                return await job.status()


@pytest.fixture
async def absent():
    """Yield the address of a service that does not run yet, and a function that starts it."""
    with reserve("127.0.0.1") as reservation:
        port = reservation.getsockname()[1]
    service = LimitServer(RewardLoopConfig(limits={"judge": {"max_concurrent": 1}}, min_samples_for_failed_share=1))
    async with contextlib.AsyncExitStack() as stack:

        async def start():
            await service.start(port=port)
            stack.push_async_callback(service.stop)
            return service

        yield f"127.0.0.1:{port}:{service.token}", start


async def test_what_is_reported_before_the_first_connection_fails_is_sent_later(absent):
    address, start = absent
    job = RemoteLimits(address)
    job.spend(2.0, 10)
    job.count(RewardResult(Outcome.FAILED, None, error="sample u1 failed"))
    with pytest.raises(TypeError):
        job.spend(object(), 0)  # which must not spoil the others
    with pytest.raises(JobServiceError):
        await job.status()
    job.spend(1.0, 5)
    service = await start()
    await answered(job)
    assert (service.limits.cost, service.limits.tokens) == (3.0, 15)
    assert "sample u1 failed" in service.stopped
    job.close()


@pytest.mark.parametrize("is_away", [False, True])
async def test_after_a_close_the_bound_of_an_outage_starts_again(is_away, absent):
    address, start = absent
    service = await start()
    job = RemoteLimits(address, RewardLoopConfig(outage_timeout_s=600))
    await job.status()
    if is_away:
        await service.stop()
        with pytest.raises(JobServiceError):
            await job.status()
    job.close()
    await advance(0)  # the end of the connection
    await advance(601)
    if not is_away:
        await service.stop()
    for _ in range(2):  # calls wait
        job.count(RewardResult(Outcome.SCORED, 1.0))
        assert await job.why_stopped() is None
    for _ in range(13):
        await advance(50)
        stopped = await job.why_stopped()
    assert "unreachable" in stopped
    with pytest.raises(JobServiceError, match="unreachable"):
        job.count(RewardResult(Outcome.SCORED, 1.0))
    job.close()


async def lost_and_left_alone(absent, lose):
    """Return the service and its client, whose connection was lost half an hour ago and not used since."""
    address, start = absent
    service = await start()
    job = RemoteLimits(address, RewardLoopConfig(outage_timeout_s=600))
    held = await job.acquire("judge")
    waiting = asyncio.create_task(job.acquire("judge"))
    await until(lambda: service.limits.snapshot()["limits"]["judge"]["waiting"] == 1)
    await lose(service)
    with pytest.raises(JobServiceError):
        await waiting
    held.leave()
    await advance(1800)
    return service, job


async def test_a_connection_that_was_lost_while_nothing_used_it_is_no_outage(absent):
    service, job = await lost_and_left_alone(absent, lambda service: service.disconnect())
    job.count(RewardResult(Outcome.FAILED, None, error="sample u1 failed"))
    await job.status()  # the service has then counted what was reported before
    assert "sample u1 failed" in service.stopped
    job.close()


async def test_time_in_which_nothing_used_the_limits_is_not_part_of_an_outage(absent):
    _, job = await lost_and_left_alone(absent, lambda service: service.stop())
    for _ in range(2):  # the service is still away: its outage has just begun
        with pytest.raises(JobServiceError):
            await job.status()
        job.count(RewardResult(Outcome.SCORED, 1.0))
    job.close()


async def test_any_answer_of_the_service_ends_its_outage(absent):
    address, start = absent
    job = RemoteLimits(address)
    with pytest.raises(JobServiceError) as caught:
        await job.status()
    outage = job.outages.failed(JudgeAddress(caught.value.unreachable))

    async def waits():
        async with outage.turn() as may_ask:
            return may_ask

    waiting = asyncio.create_task(waits())
    await start()
    with pytest.raises(LimitError):
        await job.acquire("no such limit")
    assert await waiting
    assert not job.outages.open
    job.close()
