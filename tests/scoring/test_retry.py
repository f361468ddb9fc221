import asyncio
import time
from types import SimpleNamespace

import pytest

from reward_loop import RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop.config import RetryConfig
from reward_loop.errors import (
    LimitError,
    RequestError,
    RewardCrashedError,
    TransientError,
)
from reward_loop.limits.outages import JudgeAddress, Outages
from reward_loop.processes.outcome import CallOutcome
from reward_loop.scoring.retry import Retry
from tests.support.clock import advance


def asks(seconds):
    return TransientError("later", retry_after=seconds)


class Pauses:
    def __init__(self):
        self.seconds = []

    async def __call__(self, seconds):
        self.seconds.append(seconds)


async def again(config, outcomes, elapsed=0.0):
    """Return the value or the exception of the last attempt, and the pauses. ``outcomes`` are those of the attempts."""
    pauses = Pauses()
    outcomes = iter(outcomes)

    async def attempt(*_):
        outcome = next(outcomes)
        error = outcome if isinstance(outcome, BaseException) else None
        return CallOutcome(outcome, error, 0.0)

    last = await Retry(config, sleep=pauses).again(await attempt(), attempt, time.monotonic() - elapsed)
    return last.value, pauses.seconds


PERMANENT, LATE, LAST = ValueError(), TimeoutError(), TimeoutError("the third")


@pytest.mark.parametrize(
    ("max_attempts", "outcomes", "result", "longest"),
    [
        (3, [LATE, LATE, 1.0], 1.0, [0.5, 1.0]),
        (3, [LATE, LATE, LAST, 1.0], LAST, [0.5, 1.0]),
        (9, [LATE, PERMANENT, 1.0], PERMANENT, [0.5]),
        (1, [LAST, 1.0], LAST, []),
    ],
)
async def test_a_call_is_retried_until_it_succeeds_or_fails_for_good(max_attempts, outcomes, result, longest):
    last, pauses = await again(RetryConfig(max_attempts=max_attempts, initial_wait=0.5), outcomes)
    assert last is result
    assert len(pauses) == len(longest)
    assert all(0 <= pause <= most for pause, most in zip(pauses, longest, strict=True))


async def test_retry_after_is_waited_for_in_full_and_clients_return_at_different_times():
    config = RetryConfig(max_wait=1, initial_wait=0.5)
    pauses = [(await again(config, [asks(30), 1.0]))[1][0] for _ in range(20)]
    assert all(30 <= pause <= 30.5 for pause in pauses)
    assert len(set(pauses)) > 1


async def test_no_pause_begins_that_ends_past_the_deadline():
    error = asks(30)
    assert await again(RetryConfig(max_seconds=20), [error, 1.0]) == (error, [])
    assert await again(RetryConfig(max_seconds=100), [error, 1.0], elapsed=80) == (error, [])


async def test_pauses_are_bounded_and_vary():
    config = RetryConfig(max_attempts=50, max_wait=2, max_seconds=10_000)
    _, pauses = await again(config, [TimeoutError()] * 60)
    assert len(pauses) == 49
    assert max(pauses) <= 2
    assert len(set(pauses)) > 40


@pytest.mark.parametrize("last", [1.0, ValueError()])
async def test_the_times_of_all_attempts_are_in_the_result(last):
    outcomes = iter([asks(0.05), last])

    def function(solution_str):
        time.sleep(0.02)
        outcome = next(outcomes)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    options = RewardLoopConfig(retry={"max_attempts": 2, "initial_wait": 0.001})
    result = await ScoringFunction(function, options=options)(RewardSample(""))
    assert result.score == (last if last == 1.0 else None)
    assert result.attempts == 2
    assert result.work_s >= 0.04
    assert result.wait_s >= 0.05
    assert result.queue_s > 0


class BusyError(Exception):
    """As a client raises it for HTTP 429, with or without the header ``Retry-After``."""

    status = 429

    def __init__(self, seconds=None):
        self.retry_after = seconds


@pytest.mark.parametrize("error", [asks(5), BusyError(), BusyError(0), BusyError(20)])
async def test_a_busy_service_uses_up_no_attempts(error):
    result, pauses = await again(RetryConfig(max_attempts=2, max_seconds=10_000), [error] * 8 + [1.0])
    assert result == 1.0
    assert len(pauses) == 8
    assert min(pauses) >= (error.retry_after or 0)


async def test_other_errors_use_up_attempts_also_between_refusals():
    outcomes = [TimeoutError(), BusyError(1), TimeoutError(), 1.0]
    result, pauses = await again(RetryConfig(max_attempts=2), outcomes)
    assert isinstance(result, TimeoutError)
    assert len(pauses) == 2


async def test_a_service_that_stays_busy_is_asked_at_growing_intervals_until_max_seconds(monkeypatch):
    now, attempts = 0.0, 1
    monkeypatch.setattr("reward_loop.scoring.retry.time.monotonic", lambda: now)

    async def sleep(seconds):
        nonlocal now
        now += seconds

    async def attempt(*_):
        nonlocal attempts
        attempts += 1
        return CallOutcome(None, BusyError(1), 0.0)

    last = await Retry(RetryConfig(max_seconds=600), sleep=sleep).again(await attempt(), attempt, now)
    assert isinstance(last.exception, BusyError)
    assert 539 <= now < 600  # the last pause would end later
    assert 10 < attempts < 80


async def test_waiting_for_limits_does_not_count_towards_max_seconds():
    waited = CallOutcome(None, BusyError(1), 0.0)
    waited.wait_s = 1000.0
    pauses = Pauses()

    async def attempt(*_):
        return CallOutcome(1.0, None, 0.0)

    retry = Retry(RetryConfig(max_seconds=600), sleep=pauses)
    assert (await retry.again(waited, attempt, time.monotonic() - 1000.0)).value == 1.0
    assert len(pauses.seconds) == 1


JUDGE = "http://judge:1"
AWAY = RequestError("refused", unreachable=JUDGE)


def raised(error):
    return CallOutcome(None, error, 0.0)


def answered(status, *, retry_after=None, url=None):
    """Return the error of a client with the answer of a server."""
    error = RequestError("no", status=status, retry_after=retry_after)
    if url is not None:
        error.request = SimpleNamespace(url=url)
    return raised(error)


async def after_a_probe(outcome):
    """Return the outage of a judge after its first probe ended with this outcome, while another call waits for it."""
    outages = Outages(600.0)
    outage = outages.failed(JudgeAddress(JUDGE))
    gate = asyncio.Event()

    async def attempt(_):
        gate.set()
        return outcome

    async def waits():
        async with outage.turn() as may_ask:
            return may_ask

    # One attempt: the call ends with its probe, unless that waits for a judge, too.
    retry = Retry(RetryConfig(max_attempts=1))
    probe = asyncio.create_task(retry.again(raised(AWAY), attempt, time.monotonic(), outages, "f"))
    await asyncio.sleep(0)
    other = asyncio.create_task(waits())
    await asyncio.sleep(0)
    await advance(0.5)
    await gate.wait()
    await advance(0)
    had_turn = other.done()
    await advance(6)
    assert other.done()  # in every case: the turn has passed to the other call
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    return had_turn


@pytest.mark.parametrize(
    "outcome",
    [
        CallOutcome.without_call(LimitError("no permit within max_wait=1 s")),
        CallOutcome(None, None, 1.0, RewardCrashedError("was killed")),
        raised(LimitError("limit 'judge': no permit")),
        raised(RequestError("refused", unreachable="http://another:1")),
        raised(RequestError("no answer within 300 s")),
        raised(TimeoutError()),
        answered(503),
        answered(200),  # the page of a gateway
        answered(400, url="http://another:1/v1/chat/completions"),
    ],
)
async def test_a_probe_without_an_answer_of_the_judge_passes_its_turn_to_another_call(outcome):
    assert not await after_a_probe(outcome)


@pytest.mark.parametrize(
    "outcome",
    [
        CallOutcome(None, None, 1.0),  # a verdict without a score
        answered(400),
        answered(404, url="http://judge:1/v1/chat/completions"),
        answered(404, url="http://u:p@judge:1/v1"),
        answered(500),
        answered(429, retry_after=1.0),
        answered(503, retry_after=1.0),  # it is up, and busy
    ],
)
async def test_a_reply_or_an_error_of_the_judge_ends_its_outage(outcome):
    assert await after_a_probe(outcome)


async def test_a_reply_after_further_attempts_ends_the_outage_too():
    outages = Outages(600.0)
    outages.failed(JudgeAddress(JUDGE))
    outcomes = iter([raised(TimeoutError()), CallOutcome(1.0, None, 1.0)])

    async def attempt(_):
        return next(outcomes)

    retry = Retry(RetryConfig(), sleep=Pauses())
    call = asyncio.create_task(retry.again(raised(AWAY), attempt, time.monotonic(), outages, "f"))
    await asyncio.sleep(0)
    await advance(0.5)
    assert (await call).value == 1.0
    assert not outages.open
