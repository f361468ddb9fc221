from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from reward_loop.router import messages
from reward_loop.router.messages import LimitedLog, Refusal


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
