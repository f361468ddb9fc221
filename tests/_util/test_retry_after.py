import asyncio
import json
import time
from datetime import UTC, datetime, timedelta, timezone
from email.utils import format_datetime

import pytest

from reward_loop import RewardLoopConfig, RewardLoopError, RewardSample, ScoringFunction
from reward_loop._util.retry_after import asked_pause, is_incurable, is_out_of_credit, retry_after_seconds
from reward_loop._util.transient import is_transient, out_of_credit
from reward_loop.errors import RequestError, ServerError


@pytest.fixture(params=["UTC", "America/Los_Angeles", "Asia/Kolkata"])
def zone(request, monkeypatch):
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def in_(seconds):
    return datetime.now(UTC) + timedelta(seconds=seconds)


DATES = {
    "IMF": lambda at: format_datetime(at, usegmt=True),
    "offset": lambda at: format_datetime(at.astimezone(timezone(timedelta(hours=5, minutes=30)))),
    "unknown zone": lambda at: format_datetime(at.replace(tzinfo=None)),  # -0000
    "asctime": lambda at: at.strftime("%a %b %e %H:%M:%S %Y"),
    "RFC 850": lambda at: at.strftime("%A, %d-%b-%y %H:%M:%S GMT"),
    "ISO": lambda at: at.isoformat(),
    "ISO, no zone": lambda at: at.strftime("%Y-%m-%dT%H:%M:%S"),
}


@pytest.mark.parametrize("form", DATES)
def test_dates_in_every_time_zone(form, zone):
    assert retry_after_seconds(DATES[form](in_(120))) == pytest.approx(120, abs=30)
    assert retry_after_seconds(DATES[form](in_(-3600))) == 0


@pytest.mark.parametrize("value", ["soon", "", "nan", "inf", "Mon, 99 Nov 2026 10:00:00 GMT", None])
def test_what_is_no_time(value):
    assert retry_after_seconds(value) is None


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After-Ms": "250", "Retry-After": "1"}, 0.25),
        ({"retry-after": "7", "x-ratelimit-reset-requests": "6m0s"}, 7),
        ({"x-ratelimit-reset-tokens": "120ms"}, 0.12),
        ({"x-ratelimit-reset-requests": "1h2m3.5s"}, 3723.5),
        ({"x-ratelimit-reset-requests": "1s", "x-ratelimit-reset-tokens": "6m0s"}, 360),
        (
            {
                "x-ratelimit-remaining-requests": "0",
                "x-ratelimit-reset-requests": "1s",
                "x-ratelimit-remaining-tokens": "149984",
                "x-ratelimit-reset-tokens": "6m0s",
            },
            1,
        ),
        ({"x-ratelimit-reset": "30"}, 30),
        ({"x-ms-retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"x-ratelimit-reset-requests": "1h 2M"}, 3720),
        ({"ratelimit-reset": "30"}, 30),
        ({"x-ratelimit-reset-requests": "later"}, None),
        ({}, None),
    ],
)
def test_headers(headers, seconds):
    assert asked_pause(headers, 429) == seconds


def test_moments_in_headers(zone):
    for headers in (
        {"anthropic-ratelimit-requests-reset": in_(90).strftime("%Y-%m-%dT%H:%M:%SZ")},
        {"anthropic-ratelimit-input-tokens-reset": in_(90).isoformat()},
        {"x-ratelimit-reset": str(int(time.time() + 90))},
        {"x-ratelimit-reset": str(int(1000 * (time.time() + 90)))},
    ):
        assert asked_pause(headers, 429) == pytest.approx(90, abs=30)


def test_other_answers_have_the_headers_of_limits_too():
    headers = {"x-ratelimit-reset-requests": "6m0s"}
    assert asked_pause(headers, 500) is None
    assert asked_pause(headers) is None


GOOGLE = (
    '{"error": {"code": 429, "details": [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "5s"}]}}'
)
OPENROUTER = json.dumps({"error": {"code": 429, "metadata": {"headers": {"X-RateLimit-Reset": "%d"}}}})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (GOOGLE, 5),
        (json.dumps({"error": {"metadata": {"raw": GOOGLE}}}), 5),
        ("Rate limit reached for gpt-5: Limit 30000, Used 29000, Requested 2000. Please try again in 5s.", 5),
        ("Please try again in 1m26.4s. Visit", 86.4),
        ("Please try again in 120ms", 0.12),
        ("Rate limit is exceeded. Try again in 20 seconds.", 20),
        ("Please retry after 30", 30),
        ('{"metadata": {"headers": {"X-RateLimit-Reset-Requests": "6s"}}}', 6),
        ("Please try again later", None),
    ],
)
def test_the_text_of_a_refusal_names_the_pause(text, seconds):
    assert asked_pause({}, 429, text) == seconds
    assert asked_pause({"Retry-After": "2"}, 429, text) == 2
    assert asked_pause({}, 500, text) is None


@pytest.mark.parametrize("unit", [1, 1000])
def test_the_text_of_a_refusal_names_a_moment(unit):
    text = OPENROUTER % (unit * (time.time() + 90))
    assert asked_pause({}, 429, text) == pytest.approx(90, abs=30)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Request too large for gpt-5 on tokens per min (TPM): Limit 30000, Requested 40000.", True),
        ("Quota exceeded for metric: generate_content_free_tier_requests, limit: 0, model: gemini-3", True),
        ("Rate limit reached on requests per day (RPD): Limit 200, Used 200. Please try again in 7m12s.", True),
        ('{"quotaId": "GenerateRequestsPerDayPerProjectPerModel-FreeTier"}', True),
        ("Rate limit exceeded: free-models-per-day", True),
        ("You have reached your daily limit", True),
        ('{"quotaId": "GenerateRequestsPerMinutePerProjectPerModel-FreeTier"}', False),
        ("Rate limit reached on tokens per min (TPM): Limit 30000, Used 29000. Please try again in 2s.", False),
        ("Rate limit exceeded. Remaining limit: 0. Try again in 5 s.", False),
        ("The limit: 0.5 requests per second", False),
    ],
)
def test_a_refusal_that_no_pause_cures(text, expected):
    assert is_incurable(429, text) is expected
    assert not is_incurable(400, text)


OPENAI = '{"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}'
ANTHROPIC = '{"type": "error", "error": {"message": "Your credit balance is too low to access the API."}}'


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (429, OPENAI, True),
        (400, ANTHROPIC, True),
        (403, '{"error": {"code": "billing_hard_limit_reached"}}', True),
        (402, "", True),
        (400, '{"code": "Arrearage", "message": "Access denied."}', True),
        (401, OPENAI, True),
        (403, '{"code": 30001, "message": "Sorry, your account balance is insufficient"}', True),
        (403, '{"error": {"code": "AccountOverdueError"}}', True),
        (429, '{"error": {"code": "InsufficientQuota"}}', True),
        (429, '{"error": {"code": "1113", "message": "Insufficient balance. Please recharge."}}', True),
        (429, '{"error": {"type": "exceeded_current_quota_error"}}', True),
        (429, '{"error": "Your team has used all available credits or reached its monthly spending limit."}', True),
        (429, '{"error": {"message": "You exceeded your current quota", "status": "RESOURCE_EXHAUSTED"}}', False),
        (400, '{"error": {"message": "invalid input: \'the account has insufficient balance\'"}}', False),
        (429, '{"error": {"code": "rate_limit_exceeded"}}', False),
        (200, OPENAI, False),
        (None, OPENAI, False),
    ],
)
def test_out_of_credit(status, text, expected):
    assert is_out_of_credit(status, text) is expected


class Response:
    status_code = 429
    text = OPENAI


class HTTPStatusError(Exception):
    """As httpx and requests raise it: the text is in the response only."""

    response = Response()


def raised(error, cause):
    try:
        raise error from cause
    except Exception as whole:
        return whole


@pytest.mark.parametrize(
    "error",
    [
        RequestError(f"POST http://x was answered with status 429: {OPENAI}", status=429),
        HTTPStatusError("Client error '429 Too Many Requests'"),
        raised(ServerError("1 of 3 judges"), ExceptionGroup("", [RequestError("", status=402), RequestError("")])),
    ],
)
def test_without_credit_a_call_is_not_repeated_and_the_run_stops(error):
    calls = []

    async def judge(solution_str):
        calls.append(solution_str)
        raise error

    assert out_of_credit(error)
    assert not is_transient(error)
    function = ScoringFunction(judge, options=RewardLoopConfig(on_failed="mask"))
    with pytest.raises(RewardLoopError, match=r"sample u7: .*judge.* no credit left, so the run stops"):
        asyncio.run(function(RewardSample("4", uid="u7")))
    assert calls == ["4"]
