from __future__ import annotations

import pytest

from reward_loop.client import http
from reward_loop.config import Config, RewardModelConfig, parse
from reward_loop.errors import ConfigError
from reward_loop.router.config import BackendConfig, RouterConfig


@pytest.mark.parametrize("url", ["http://a", "http://a.b:1", "http://[::1]:80", "http://127.0.0.1:8000/"])
def test_origins(url: str) -> None:
    assert BackendConfig(url=url).url == url.rstrip("/")


NO_ORIGINS = """
    a:1 // ftp://a http://a/v1 http://u:p@a http://a?x http:// http://:1 http://a:x http://a:99999 http://[::
    http://[:.:]:1 http://[::1%25lo]:1 http://\u2100:1 http://\ud800:1 http://a\x00b:1
"""


@pytest.mark.parametrize("url", ["", "http://a b", *NO_ORIGINS.split()])
def test_a_url_that_is_not_an_origin_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url: "):
        parse(BackendConfig, {"url": url}, "worker")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_failed_checks": 0}, "max_failed_checks"),
        ({"request_timeout_s": 0}, "request_timeout_s"),
        ({"policy": "fastest"}, "policy"),
        ({"api_key": ""}, "api_key"),
        ({"timeout": 1}, "timeout"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(RouterConfig, options, "router")


@pytest.mark.parametrize("of", [RouterConfig, RewardModelConfig])
def test_by_default_a_frozen_server_is_detected_within_ten_seconds(of: type[Config]) -> None:
    names = ("health_interval_s", "health_timeout_s", "max_failed_checks")
    interval, timeout, checks = (of.model_fields[name].default for name in names)
    # The pause before a check, and checks that time out and follow each other without a pause.
    assert interval + checks * timeout <= 10


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(RouterConfig(api_key="secret", worker_api_key="secret"))


def test_the_routers_explanation_arrives_before_the_client_gives_up() -> None:
    assert RouterConfig().request_timeout_s == RewardModelConfig().request_timeout_s < http.USUAL_TIMEOUT_S


def test_keys_have_no_white_space_around_them() -> None:
    config = RouterConfig(api_key="secret\n", worker_api_key=" other\r\n")
    assert (config.api_key, config.worker_api_key) == ("secret", "other")
    with pytest.raises(ConfigError, match="worker_api_key contains a line break"):
        RouterConfig(worker_api_key="one\ntwo")
