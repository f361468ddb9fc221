from __future__ import annotations

import pytest

from reward_loop._util.sockets import is_loopback, listen
from reward_loop._util.web_command import api_key, open_listener
from reward_loop.errors import ConfigError


def test_the_key_is_that_of_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    monkeypatch.setenv("NO_KEY", "")
    assert api_key(None) is None
    assert api_key("A_KEY") == "secret"
    for name in ("NO_KEY", "NOT_SET"):
        with pytest.raises(ConfigError, match=f"--api-key-env {name}: this environment variable is not set"):
            api_key(name)


def test_an_address_beyond_loopback_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="--api-key-env"):
        open_listener("0.0.0.0", 0, None)
    with open_listener("0.0.0.0", 0, "secret") as listener:
        assert not is_loopback(listener)
    with open_listener("127.0.0.1", 0, None) as listener:
        assert is_loopback(listener)


def test_a_port_in_use_is_an_error_with_advice() -> None:
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: .* --port 0"):
            open_listener("127.0.0.1", port, None)
