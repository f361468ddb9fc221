from __future__ import annotations

import logging
from types import SimpleNamespace

import orjson
import pytest

from reward_loop.router import messages
from reward_loop.router.messages import LimitedLog, Refusal
from tests.support.servers import CHAT, model_server, post, routed


def test_router_errors_have_the_format_of_vllm() -> None:
    headers, body = Refusal(404, "no such model", param="model").render()
    assert orjson.loads(body) == {
        "error": {"message": "no such model", "type": "RouterError", "param": "model", "code": 404}
    }
    assert headers == [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]


def test_headers_that_say_what_to_do() -> None:
    assert (b"retry-after", b"1") in Refusal(503, "full", retry_after_s=0.01).render()[0]
    assert (b"retry-after", b"3") in Refusal(429, "rest", retry_after_s=2.1).render()[0]
    assert (b"www-authenticate", b"Bearer") in Refusal(401, "key").render()[0]


def test_the_first_message_of_a_kind_is_logged_and_the_others_are_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(messages, "time", SimpleNamespace(monotonic=lambda: now))
    log = LimitedLog(logging.getLogger("reward_loop.test"), interval_s=10.0)
    for number in range(1000):
        log.refused_request("POST", f"/{number}", Refusal(503, "full"))
    log.refused_request("POST", "/x", Refusal(413, "long"))
    assert caplog.messages == ["POST /0: 503, full", "POST /x: 413, long"]
    assert log.refused == {503: 1000, 413: 1}
    now += 10.0
    log.refused_request("POST", "/y", Refusal(503, "full"))
    log.refused_request("POST", "/z", Refusal(413, "long"))
    more = "(and 999 more like this since the last such line)"
    assert caplog.messages[2:] == [f"POST /y: 503, full {more}", "POST /z: 413, long"]


async def test_refused_requests_do_not_write_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    async with routed(model_server("m"), max_body_bytes=10) as (url, _, session):
        caplog.clear()
        assert [(await post(url, CHAT, b"x" * 11))[0] for _ in range(50)] == [413] * 50
        async with session.get("/metrics") as response:
            assert 'reward_loop_router_refused_total{status="413"} 50.0' in await response.text()
        assert len([message for message in caplog.messages if "413" in message]) == 1
