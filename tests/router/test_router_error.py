from __future__ import annotations

import orjson

from reward_loop.router.router_error import Refusal


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
